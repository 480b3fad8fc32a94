"""The keys of sealed files, each wrapped by its tenant's key, and that by one derived from the master key.

They lie in one table, apart from the files. What destroys a key makes every copy of its file useless, backups of the
files included (a backup of the table is the exception). An object without a row here was written by an earlier version
and is plain. What the keys do: `tuneship/security/sealed_files.py`.
"""

import secrets
import threading
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from tuneship.security.master_key import derived_secret
from tuneship.security.sealed_files import ObjectDamaged, new_key
from tuneship.security.vault import SealBroken, Vault
from tuneship.startup import StartupError
from tuneship.store import tables
from tuneship.store.database import Database

TENANT_KEY_BYTES = 32
# Before the client id, in the name of a tenant's key.
TENANTS = "tenants/"


class AnotherMasterKey(StartupError):
    """The master key is not the one that the database was made with."""

    def __init__(self) -> None:
        super().__init__(
            "the master key is not the one that this database was made with: put that one back, or "
            "name its file by TUNESHIP_MASTER_KEY_FILE"
        )


class Keyring:
    """Makes, finds and destroys the keys of objects, named `datasets/<id>`, `jobs/<id>` and `models/<job id>`."""

    def __init__(self, master: bytes) -> None:
        """`master`: 32 bytes that lie outside the database."""
        self._vault = Vault(master)
        self._left = threading.Event()
        """Something of a destroyed key may still be in the database's log."""
        self._left.set()
        self._tenant_key = lru_cache(maxsize=1024)(self._unwrapped)

    def check(self, connection: sa.Connection) -> None:
        """Raises `AnotherMasterKey`: better at the start than when somebody asks for a file."""
        table = tables.object_keys
        query = sa.select(table.c.object_id, table.c.wrapped)
        row = connection.execute(
            query.where(table.c.object_id.startswith(TENANTS)).limit(1)
        ).first()
        if row is not None:
            try:
                self._unwrapped(*row)
            except SealBroken:
                raise AnotherMasterKey from None

    def add(
        self, connection: sa.Connection, client_id: str, object_id: str, key: str, now: datetime
    ) -> None:
        """Keep a key in the transaction of the object's row."""
        wrapped = self._vault_of(connection, client_id, now).seal(key.encode(), object_id)
        _insert(connection, client_id, object_id, wrapped, now)

    def make(
        self, connection: sa.Connection, client_id: str, object_id: str, now: datetime
    ) -> None:
        """A new key for an object that is to be written."""
        self.add(connection, client_id, object_id, new_key(), now)

    def find(self, connection: sa.Connection, client_id: str, object_id: str) -> str | None:
        """The key of an object; None when it is not sealed. Raises `ObjectDamaged`: the key is another object's."""
        table, name = tables.object_keys, _name(client_id)
        query = sa.select(table.c.object_id, table.c.wrapped)
        both = connection.execute(query.where(table.c.object_id.in_((object_id, name))))
        found = {row.object_id: row.wrapped for row in both}
        if object_id not in found:
            return None
        try:
            vault = Vault(self._tenant_key(name, found[name]))
            return vault.open(found[object_id], object_id).decode()
        except (KeyError, SealBroken):
            raise ObjectDamaged from None

    def open(self, connection: sa.Connection, row: "sa.Row[Any]") -> None:
        """Try a row of the table of keys. Raises `SealBroken`, `ObjectDamaged`."""
        if row.object_id.startswith(TENANTS):
            self._unwrapped(row.object_id, row.wrapped)
        else:
            self.find(connection, row.client_id, row.object_id)

    @staticmethod
    def is_sealed(connection: sa.Connection, object_id: str) -> bool:
        """Whether there is a key for it."""
        return _wrapped(connection, object_id) is not None

    def destroy(self, connection: sa.Connection, *object_ids: str) -> None:
        """From the commit on nothing opens the objects' files any more."""
        table = tables.object_keys
        self._left.set()  # while the transaction is open, nothing is forgotten
        connection.execute(sa.delete(table).where(table.c.object_id.in_(object_ids)))

    def forget(self, database: Database) -> None:
        """Leave nothing of destroyed keys in the database's log; call it again and again."""
        if not self._left.is_set():
            return
        self._left.clear()
        is_done = False
        try:
            is_done = database.truncate_log()
        finally:
            if not is_done:
                self._left.set()

    def _vault_of(self, connection: sa.Connection, client_id: str, now: datetime) -> Vault:
        """With the tenant's key, which is made when its first object is."""
        name = _name(client_id)
        wrapped = _wrapped(connection, name)
        if wrapped is None:
            wrapped = self._vault.seal(secrets.token_bytes(TENANT_KEY_BYTES), name)
            _insert(connection, client_id, name, wrapped, now)
        return Vault(self._tenant_key(name, wrapped))

    def _unwrapped(self, name: str, wrapped: bytes) -> bytes:
        return self._vault.open(wrapped, name)


def keyring_of(master: bytes) -> Keyring:
    """The keyring of a service with this master key."""
    return Keyring(derived_secret(master, "objects"))


def _name(client_id: str) -> str:
    return f"{TENANTS}{client_id}"


def _wrapped(connection: sa.Connection, object_id: str) -> bytes | None:
    table = tables.object_keys
    query = sa.select(table.c.wrapped).where(table.c.object_id == object_id)
    return connection.execute(query).scalar()


def _insert(
    connection: sa.Connection, client_id: str, object_id: str, wrapped: bytes, now: datetime
) -> None:
    values = {
        "object_id": object_id,
        "client_id": client_id,
        "wrapped": wrapped,
        "created_at": now,
    }
    connection.execute(sa.insert(tables.object_keys).values(values))
