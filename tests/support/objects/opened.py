"""Decrypt the sealed files of a service with its master key."""

from pathlib import Path

import sqlalchemy as sa

from tests.support.faults.invariants import rows_of
from tuneship.security.master_key import read_or_make_secret
from tuneship.security.sealed_files import read_plain
from tuneship.service.access.data_keys import keyring_of


def opened(connection: sa.Connection, data_dir: Path, table: sa.Table) -> dict[str, bytes]:
    """Decrypt the files of all datasets or models, by path; raise `ObjectDamaged` for a damaged one."""
    keyring = keyring_of(read_or_make_secret(data_dir / "master.key"))
    found: dict[str, bytes] = {}
    for row in rows_of(connection, table):
        stored = data_dir / "blobs" / row["blob"]
        folder = stored if stored.is_dir() else stored.parent
        name = folder.relative_to(data_dir / "blobs").as_posix()
        key = keyring.find(connection, row["client_id"], name)
        found |= {f"{name}/{file.name}": read_plain(file, key) for file in folder.iterdir()}
    return found
