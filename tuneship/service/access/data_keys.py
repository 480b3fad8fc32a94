"""Data keys of sealed files: each is wrapped by its tenant's key, which is wrapped by a key derived from the master
key.

They are in one table, apart from the files. Destroying a key makes every copy of its file useless, backups of the files
included (but not backups of the table). The files are sealed by `tuneship/security/sealed_files.py`.
"""

import secrets
import threading
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from tuneship.host.startup import StartupError
from tuneship.security.master_key import derived_secret
from tuneship.security.sealed_files import ObjectDamaged, new_key
from tuneship.security.vault import SealBroken, Vault
from tuneship.store.database.database import Database
from tuneship.store.records import object_key_records

TENANT_KEY_BYTES = 32
# The prefix of a tenant key's name, before the client id.
TENANTS = "tenants/"


class AnotherMasterKey(StartupError):
    """The master key is not the one that the database was made with."""

    def __init__(self) -> None:
        super().__init__(
            "the master key is not the one that this database was made with: put that one back, or "
            "name its file by TUNESHIP_MASTER_KEY_FILE"
        )


class KeyGone(ObjectDamaged, FileNotFoundError):
    """An object's key was destroyed, so the object cannot be read: a delete destroys the key first."""

    def __init__(self) -> None:
        OSError.__init__(self, "the key of a stored file is gone")


class Keyring:
    """Creates, finds and destroys the data keys of objects, by the object's name, and of jobs, by `jobs/<id>`.

    The key of an adapter is made with its job, as `models/<job id>`; a model's files have the name of an attempt too.
    """

    def __init__(self, master: bytes) -> None:
        """`master`: 32 bytes that are kept outside the database."""
        self._vault = Vault(master)
        self._has_remains = threading.Event()
        # Nobody knows whether the run before this one came to remove what it had destroyed.
        self._has_remains.set()
        # By name and wrapped value, so that a key that was made again is never taken for the old one.
        self._tenant_key = lru_cache(maxsize=1024)(self._unwrapped)

    def add(
        self, connection: sa.Connection, client_id: str, object_id: str, key: str, now: datetime
    ) -> None:
        """Store a key in the transaction of the object's row."""
        # The tenant's key is made with its first object.
        name = _name(client_id)
        wrapped_tenant_key = object_key_records.wrapped_keys(connection, name).get(name)
        if wrapped_tenant_key is None:
            wrapped_tenant_key = self._vault.seal(secrets.token_bytes(TENANT_KEY_BYTES), name)
            object_key_records.add(connection, client_id, name, wrapped_tenant_key, now)
        vault = Vault(self._tenant_key(name, wrapped_tenant_key))
        object_key_records.add(
            connection, client_id, object_id, vault.seal(key.encode(), object_id), now
        )

    def make(
        self, connection: sa.Connection, client_id: str, object_id: str, now: datetime
    ) -> None:
        """Store a new key for an object that is to be written."""
        self.add(connection, client_id, object_id, new_key(), now)

    def rename(
        self, connection: sa.Connection, client_id: str, before: str, after: str, now: datetime
    ) -> None:
        """Give the key of an object another name. Raises `KeyGone`, and `ObjectDamaged` when it cannot be opened."""
        key = self.find(connection, client_id, before)
        self.add(connection, client_id, after, key, now)
        self.destroy(connection, before)

    def find(self, connection: sa.Connection, client_id: str, object_id: str) -> str:
        """The key of an object. Raises `KeyGone`, and `ObjectDamaged` when it cannot be opened."""
        name = _name(client_id)
        found = object_key_records.wrapped_keys(connection, object_id, name)
        if object_id not in found:
            raise KeyGone
        try:
            vault = Vault(self._tenant_key(name, found[name]))
            return vault.open(found[object_id], object_id).decode()
        except (KeyError, SealBroken):
            raise ObjectDamaged from None

    def open(self, connection: sa.Connection, row: "sa.Row[Any]") -> None:
        """Try to open a row of the table of keys. Raises `SealBroken` or `ObjectDamaged`."""
        if row.object_id.startswith(TENANTS):
            self._unwrapped(row.object_id, row.wrapped)
        else:
            self.find(connection, row.client_id, row.object_id)

    def destroy(self, connection: sa.Connection, *object_ids: str) -> None:
        """Delete the keys of objects: from the commit on their files cannot be opened."""
        self._has_remains.set()  # `forget` can do nothing while the transaction is open
        object_key_records.remove(connection, object_ids)

    @property
    def has_remains(self) -> bool:
        """Whether parts of a destroyed key may still be in the database's log."""
        return self._has_remains.is_set()

    def forget(self, database: Database) -> None:
        """Remove destroyed keys from the database's log. Call it regularly, since open transactions can prevent it."""
        if not self.has_remains:
            return
        # Before the log is emptied: a key that is destroyed meanwhile sets it again.
        self._has_remains.clear()
        is_done = False
        try:
            is_done = database.truncate_log()
        finally:
            if not is_done:
                self._has_remains.set()

    def _unwrapped(self, name: str, wrapped: bytes) -> bytes:
        return self._vault.open(wrapped, name)


def keyring_of(master: bytes) -> Keyring:
    """The keyring of a service with this master key."""
    return Keyring(derived_secret(master, "objects"))


def _name(client_id: str) -> str:
    return f"{TENANTS}{client_id}"
