"""A backup on the disk: a folder with a manifest that names every file of it with its digest.

    tuneship-backup.json    the manifest, written last: without it there is no backup
    rows-<time>.sqlite      every row, also of a PostgreSQL database
    audit-heads-<time>.jsonl
    blobs/                  as in the data directory; a file never changes under its name
    master.key              only when it was asked for

The next backup into the same folder adds what is new under new names, then replaces the manifest, then removes what the
new one does not name: at every moment the manifest that is there is that of a complete backup.
"""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.host.durable import flush, flush_open, write_private
from tuneship.startup import StartupError
from tuneship.store import tables

MANIFEST = "tuneship-backup.json"
# Is there while a backup is written; names the installation.
UNFINISHED = "tuneship-backup.unfinished"
FORMAT = 1
KEY = "master.key"
BLOBS = "blobs"
TEMPORARY = ".tmp-"
OBJECT_FILE = re.compile(r"(datasets|models)/[^/\0]+/[^/\0]+")
OWN_FILE = re.compile(r"(rows|audit-heads)-[^/\0]+\.(sqlite|jsonl)")
ROWS_AT_ONCE = 500


class BackupFault(StartupError):
    """Why nothing was backed up or restored."""


@dataclass(frozen=True)
class NamedFile:
    """A file of the backup's own."""

    name: str
    sha256: str


@dataclass(frozen=True)
class BlobFile:
    """A file of a dataset or a model."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a complete backup holds."""

    installation: str
    made_at: str
    version: str
    """Of tuneship."""
    rows: NamedFile
    heads: NamedFile | None = None
    has_master_key: bool = False
    files: dict[str, BlobFile] = field(default_factory=dict[str, BlobFile])
    """By path below `blobs`."""
    missing: list[str] = field(default_factory=list[str])
    """Files that were not there, or not as their rows say, when the backup was made."""

    def write(self, folder: Path) -> None:
        """From now on this is the backup. Raises `OSError`."""
        write_private(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """None where no backup is complete. Raises `BackupFault` for what is no manifest of ours."""
    file = folder / MANIFEST
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise BackupFault(f"{file} is damaged: take another backup") from None
    try:
        if found.pop("format") != FORMAT:
            raise BackupFault(f"{folder} was written by a newer version of tuneship: use that one")
        found["rows"] = NamedFile(**found["rows"])
        found["heads"] = found["heads"] and NamedFile(**found["heads"])
        found["files"] = {path: BlobFile(**one) for path, one in found["files"].items()}
        manifest = Manifest(**found)
    except (KeyError, TypeError, AttributeError):
        raise BackupFault(f"{file} is damaged: take another backup") from None
    _check_names(manifest, file)
    return manifest


def _check_names(manifest: Manifest, file: Path) -> None:
    """A manifest that somebody has changed must not lead out of its folder."""
    own = [manifest.rows.name, *([] if manifest.heads is None else [manifest.heads.name])]
    are_ours = all(OWN_FILE.fullmatch(name) for name in own)
    if not are_ours or not all(map(_is_object_file, manifest.files)):
        raise BackupFault(f"{file} is damaged: take another backup")


def _is_object_file(path: str) -> bool:
    return OBJECT_FILE.fullmatch(path) is not None and ".." not in path.split("/")


def copy_file(source: Path, target: Path) -> str:
    """Copy a file whole or not at all, durably; answers the SHA-256 of what was written. Raises `OSError`."""
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
    """Every row of every table, from one view of `source`, into tables that are empty."""
    target.execute(sa.delete(tables.installation))
    for table in tables.METADATA.sorted_tables:
        with source.execution_options(yield_per=ROWS_AT_ONCE).execute(sa.select(table)) as found:
            for some in found.mappings().partitions():
                target.execute(sa.insert(table), [dict(row) for row in some])
    if target.dialect.name == "postgresql":
        _set_sequences(target)


def _set_sequences(target: sa.Connection) -> None:
    """PostgreSQL numbers new rows by sequences, which know nothing of rows that came with their numbers."""
    for table in tables.METADATA.sorted_tables:
        for column in table.primary_key:
            named = sa.func.pg_get_serial_sequence(table.name, column.name)
            sequence = target.scalar(sa.select(named))
            if sequence is not None:
                newest = target.scalar(sa.select(sa.func.max(column)))
                if newest is not None:
                    target.execute(sa.select(sa.func.setval(sequence, newest)))


def tidy(folder: Path, manifest: Manifest | None) -> None:
    """Remove what earlier or unfinished backups left and this one does not name; without one, all of it."""
    kept = {manifest.rows.name} if manifest else set[str]()
    if manifest and manifest.heads:
        kept.add(manifest.heads.name)
    files = manifest.files if manifest else {}
    for one in folder.iterdir():
        name = one.name.removeprefix(TEMPORARY).removesuffix("-wal").removesuffix("-shm")
        if OWN_FILE.fullmatch(name) and one.name not in kept:
            one.unlink()
    blobs = folder / BLOBS
    for one in blobs.glob("*/*/*"):
        if str(one.relative_to(blobs)) not in files:
            one.unlink()
    for empty in (*blobs.glob("*/*"), *blobs.glob("*"), blobs):
        with suppress(OSError):  # it is not empty, or was never made
            empty.rmdir()
    (folder / UNFINISHED).unlink(missing_ok=True)
