"""Restores a backup into an empty data directory and an empty database; never overwrites anything.

Every file is first copied into `<data dir>/restoring` and compared with its digest; then all are moved into place. The
ownership record, without which no service starts, is written last.
"""

import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tuneship.host.durable import flush, write_private
from tuneship.store.database.database import SQLITE_FILE, Database
from tuneship.store.files.blobs import Blobs
from tuneship.store.installation import installation
from tuneship.store.installation.backup_format import (
    BLOBS,
    KEY,
    UNFINISHED,
    BackupFault,
    Manifest,
    copy_file,
    copy_rows,
    only_one,
    read_manifest,
    rows_in,
)
from tuneship.store.installation.ownership import OWN, RECORD, name_of

RESTORING = "restoring"
ROWS, HEADS = "rows.sqlite", "heads"
# Added base models are in no backup, and may be there before.
ALLOWED_ENTRIES = frozenset({"lock", RESTORING, KEY, "cache", "base_models"})
EMPTY_FOLDERS = frozenset({BLOBS, "scratch", "work", "logs"})


@dataclass(frozen=True)
class RestoreTarget:
    """The place that a backup is restored to."""

    data_dir: Path
    url: str
    # Leads to the same database past a pooler.
    direct_url: str
    heads: Path
    master_key: Path
    blobs: Blobs


def complete_backup(folder: Path) -> Manifest:
    """Read the manifest of a complete backup. Raises `BackupFault` if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        is_unfinished = (folder / UNFINISHED).exists()
        what = "an unfinished backup: it was interrupted" if is_unfinished else "no backup"
        raise BackupFault(f"{folder} holds {what}")
    return manifest


@contextmanager
def prepared(folder: Path, manifest: Manifest, target: RestoreTarget) -> Generator[Path]:
    """Copy and verify every file of the backup, into a folder of the empty data directory, which is yielded.

    Raises `BackupFault` if the target is not empty or a file does not match its digest.
    """
    _check_empty(target)
    target.blobs.check(manifest.installation)
    target.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.data_dir.chmod(0o700)
    # The lock of a service, so that none starts meanwhile.
    lock, text = target.data_dir / "lock", f"a service or another restore runs on {target.data_dir}"
    lock.touch()
    with only_one(lock, text):
        made = target.data_dir / RESTORING
        shutil.rmtree(made, ignore_errors=True)  # a killed restore may have left it
        made.mkdir(mode=0o700)
        try:
            _copy(folder / manifest.rows.name, made / ROWS, manifest.rows.sha256)
            if manifest.heads is not None:
                _copy(folder / manifest.heads.name, made / HEADS, manifest.heads.sha256)
            (made / BLOBS).mkdir(mode=0o700)
            for path, file in manifest.files.items():
                _copy(folder / BLOBS / path, made / BLOBS / path, file.sha256)
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _copy(source: Path, target: Path, sha256: str) -> None:
    try:
        digest = copy_file(source, target)
    except FileNotFoundError:
        raise BackupFault(f"the backup is damaged: {source} is missing") from None
    if digest != sha256:
        raise BackupFault(f"the backup is damaged: {source} is not the file that was backed up")


def _check_empty(target: RestoreTarget) -> None:
    """Refuse a data directory or a database that is in use. Raises `BackupFault`."""
    for entry in target.data_dir.iterdir() if target.data_dir.exists() else ():
        is_empty_folder = entry.name in EMPTY_FOLDERS and not any(entry.iterdir())
        if entry.name not in ALLOWED_ENTRIES and not is_empty_folder:
            raise BackupFault(
                f"{target.data_dir} is not empty ({entry.name}): restore into a new data directory"
            )
    is_own = name_of(target.url, target.data_dir) == OWN
    if not is_own and installation.look(target.direct_url).is_used:
        raise BackupFault("the database is not empty: restore into a new one")
    if target.blobs.is_remote and target.blobs.names():
        text = f"{target.blobs.place} is not empty: restore into an empty bucket or prefix"
        raise BackupFault(text)


def settle(made: Path, target: RestoreTarget, master_key: str | None) -> None:
    """Move the prepared files into place and fill the database: everything, or nothing.

    `master_key`: the key from the backup if the target has none.
    """
    # Each step registers how it is undone; the callbacks run unless everything succeeded.
    with ExitStack() as undo:
        if name_of(target.url, target.data_dir) == OWN:
            with rows_in(made / ROWS) as rows, rows.read() as source:
                identity = _identity(source)
            _move(made / ROWS, target.data_dir / SQLITE_FILE, undo)
            _move_files(made, target, master_key, undo)
            _write_record(target, identity, undo)
        else:
            with (
                rows_in(made / ROWS) as rows,
                rows.read() as source,
                closing(Database(target.direct_url)) as database,
            ):
                database.claim()  # keeps services from starting on it
                with database.write() as connection:
                    copy_rows(source, connection)
                    _move_files(made, target, master_key, undo)
                    _write_record(target, _identity(source), undo)
        undo.pop_all()


def _identity(rows: sa.Connection) -> str:
    return rows.execute(sa.select(installation.installation.c.id)).scalar_one()


def _move_files(made: Path, target: RestoreTarget, master_key: str | None, undo: ExitStack) -> None:
    if target.blobs.is_remote:
        for file in sorted((made / BLOBS).glob("*/*/*")):
            name = file.parent.relative_to(made / BLOBS).as_posix()
            undo.callback(target.blobs.delete, name)
            target.blobs.put(file, f"{name}/{file.name}")
    else:
        _move(made / BLOBS, target.data_dir / BLOBS, undo)
    if (made / HEADS).exists() and not target.heads.exists():
        _move(made / HEADS, target.heads, undo)
    if master_key is not None:
        undo.callback(target.master_key.unlink, missing_ok=True)
        target.master_key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target.master_key, master_key)


def _move(source: Path, target: Path, undo: ExitStack) -> None:
    if target.is_dir():
        target.rmdir()  # it is empty: `_check_empty`
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    undo.callback(shutil.move, target, source)
    shutil.move(source, target)
    flush(target.parent)


def _write_record(target: RestoreTarget, identity: str, undo: ExitStack) -> None:
    # The record has no number of starts, since the installation may have been started after the backup.
    undo.callback((target.data_dir / RECORD).unlink, missing_ok=True)
    write_private(target.data_dir / RECORD, f"id {identity}\n")
