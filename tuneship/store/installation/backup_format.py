"""The layout of a backup on disk: a folder with a manifest that names each of its files with its digest.

    tuneship-backup.json      the manifest, written last: a folder without it holds no complete backup
    rows-<time>.sqlite        the rows, also those of a PostgreSQL database
    audit-heads-<time>.jsonl  the signed heads of the audit chain
    blobs/                    as in the data directory; a file never changes under its name
    master.key                only if requested

The next backup into the same folder adds new files under new names, then replaces the manifest, then removes the files
that the new manifest does not name: the manifest is always that of a complete backup.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from tuneship.host.durable import TEMPORARY, flush, flush_open, write_private
from tuneship.host.startup import StartupError
from tuneship.store.database import tables
from tuneship.store.database.database import Database, sqlite_url

MANIFEST = "tuneship-backup.json"
# Exists while a backup is written, and names the installation.
UNFINISHED = "tuneship-backup.unfinished"
FORMAT = 1
KEY = "master.key"
BLOBS = "blobs"
OBJECT_FILE = re.compile(r"(datasets|models|files)/[^/\0]+/[^/\0]+")
OWN_FILE = re.compile(r"(rows|audit-heads)-[^/\0]+\.(sqlite|jsonl)")
ROWS_PER_BATCH = 500
# SQLite's names of the errors of a full disk. Reading another database never ends in them.
NO_ROOM = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
# Their rows are about processes that run now. In a copy of the database, e.g. where a restore is rehearsed, they would
# lead the services to the agents of the installation that was backed up.
OF_THE_MOMENT = {
    tables.agents,
    tables.console_sessions,
    tables.failed_starts,
    tables.leader_leases,
    tables.member_ages,
    tables.member_demands,
    tables.rate_windows,
    tables.sign_in_links,
}


class BackupFault(StartupError):
    """The reason why nothing was backed up or restored."""


@dataclass(frozen=True)
class NamedFile:
    """A file of the backup itself: rows or audit heads."""

    name: str
    sha256: str


@dataclass(frozen=True)
class BlobFile:
    """A file of a dataset, of a model or of a batch."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete backup."""

    installation: str
    made_at: str
    # Version of tuneship that made the backup.
    version: str
    rows: NamedFile
    heads: NamedFile | None = None
    has_master_key: bool = False
    # Files of datasets, models and batches, by path below `blobs`.
    files: dict[str, BlobFile] = field(default_factory=dict[str, BlobFile])
    # Files that did not exist, or did not match the digests in their rows, when the backup was made.
    missing: list[str] = field(default_factory=list[str])

    def write(self, folder: Path) -> None:
        """Make this the backup that the folder holds. Raises `OSError`."""
        write_private(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if it holds no complete backup. Raises `BackupFault` if it is damaged."""
    file = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise BackupFault(f"{file} is damaged: take another backup") from None
    try:
        if content.pop("format") != FORMAT:
            raise BackupFault(f"{folder} was written by a newer version of tuneship: use that one")
        content["rows"] = NamedFile(**content["rows"])
        content["heads"] = content["heads"] and NamedFile(**content["heads"])
        content["files"] = {path: BlobFile(**entry) for path, entry in content["files"].items()}
        manifest = Manifest(**content)
    except (KeyError, TypeError, AttributeError):
        raise BackupFault(f"{file} is damaged: take another backup") from None

    # A manifest that somebody has edited must not name files outside its folder.
    own = [named.name for named in (manifest.rows, manifest.heads) if named is not None]
    if not all(OWN_FILE.fullmatch(name) for name in own) or not all(
        OBJECT_FILE.fullmatch(path) and ".." not in path.split("/") for path in manifest.files
    ):
        raise BackupFault(f"{file} is damaged: take another backup")
    return manifest


@contextmanager
def only_one(path: Path, fault: str) -> Generator[None]:
    """Hold the lock of a file or folder. Raises `BackupFault` with this text while another process holds it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupFault(fault) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def rows_in(file: Path) -> Generator[Database]:
    """Open the rows of a backup, migrated to this version; a new file gets empty tables. Raises `OSError` when full."""
    try:
        rows = Database(sqlite_url(file))
        try:
            yield rows
            rows.truncate_log()  # the file must be complete without its log
        finally:
            rows.close()
    except (OperationalError, sqlite3.OperationalError) as error:
        fault = error.orig if isinstance(error, OperationalError) else error
        if getattr(fault, "sqlite_errorname", None) in NO_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from None
        raise


def copy_file(source: Path, target: Path) -> str:
    """Copy a file durably, whole or not at all; returns the SHA-256 of the copied bytes. Raises `OSError`."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = target.with_name(TEMPORARY + target.name)
    digest = hashlib.sha256()
    try:
        with source.open("rb") as opened, temporary.open("wb") as copy:
            while block := opened.read(1 << 20):
                digest.update(block)
                copy.write(block)
            flush_open(copy)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    for folder in (target.parent, target.parent.parent):
        flush(folder)
    return digest.hexdigest()


def copy_rows(source: sa.Connection, target: sa.Connection) -> None:
    """Copy the rows of one snapshot of `source` into empty tables, except for those of `OF_THE_MOMENT`."""
    target.execute(sa.delete(tables.installation))
    for table in tables.METADATA.sorted_tables:
        if table in OF_THE_MOMENT:
            continue
        with source.execution_options(yield_per=ROWS_PER_BATCH).execute(sa.select(table)) as result:
            for batch in result.mappings().partitions():
                target.execute(sa.insert(table), [dict(row) for row in batch])
    if target.dialect.name != "postgresql":
        return
    # New rows are numbered after the copied ones, which the sequences have not counted.
    for table in tables.METADATA.sorted_tables:
        for column in table.primary_key:
            name = sa.func.pg_get_serial_sequence(table.name, column.name)
            sequence = target.scalar(sa.select(name))
            if sequence is not None:
                newest = target.scalar(sa.select(sa.func.max(column)))
                if newest is not None:
                    target.execute(sa.select(sa.func.setval(sequence, newest)))


def is_half_written(file: Path) -> bool:
    """Whether a file of a backup's folder is one that a killed backup has left before it was whole."""
    name = file.name.removeprefix(TEMPORARY)
    return name != file.name and (
        name in (MANIFEST, UNFINISHED, KEY) or bool(OWN_FILE.fullmatch(name))
    )


def tidy(folder: Path, manifest: Manifest | None) -> None:
    """Remove the files of earlier or unfinished backups that `manifest` does not name; with None, all of them."""
    kept = {manifest.rows.name} if manifest else set[str]()
    if manifest and manifest.heads:
        kept.add(manifest.heads.name)
    files = manifest.files if manifest else {}
    for file in folder.iterdir():
        name = re.sub("-(wal|shm|journal)$", "", file.name)
        if is_half_written(file) or (OWN_FILE.fullmatch(name) and file.name not in kept):
            file.unlink()
    blobs = folder / BLOBS
    for file in blobs.glob("*/*/*"):
        if str(file.relative_to(blobs)) not in files:
            file.unlink()
    for empty in (*blobs.glob("*/*"), *blobs.glob("*"), blobs):
        with suppress(OSError):  # it is not empty, or was never created
            empty.rmdir()
    (folder / UNFINISHED).unlink(missing_ok=True)
