"""Puts a backup into an empty place: a data directory, and a database, that hold nothing yet. Nothing is overwritten.

Everything is copied and compared with its digest first, into `<data dir>/restoring`; then it is moved into place, and
the record that lets a service start comes last.
"""

import fcntl
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tuneship.host.durable import flush, write_private
from tuneship.store import installation
from tuneship.store.backup_format import (
    BLOBS,
    KEY,
    UNFINISHED,
    BackupFault,
    Manifest,
    copy_file,
    copy_rows,
    read_manifest,
)
from tuneship.store.database import SQLITE_FILE, Database, sqlite_url
from tuneship.store.ownership import OWN, RECORD, name_of

RESTORING = "restoring"
ROWS, HEADS = "rows.sqlite", "heads"
MAY_BE_THERE = frozenset({"lock", RESTORING, KEY})
EMPTY_FOLDERS = frozenset({BLOBS, "scratch", "work", "logs"})


@dataclass(frozen=True)
class RestoreTarget:
    """Where a backup is restored to."""

    data_dir: Path
    url: str
    heads: Path
    master_key: Path


def complete_backup(folder: Path) -> Manifest:
    """The manifest of a backup. Raises `BackupFault`."""
    manifest = read_manifest(folder)
    if manifest is None:
        is_unfinished = (folder / UNFINISHED).exists()
        what = "an unfinished backup: it was broken off" if is_unfinished else "no backup"
        raise BackupFault(f"{folder} holds {what}")
    return manifest


@contextmanager
def prepared(folder: Path, manifest: Manifest, target: RestoreTarget) -> Generator[Path]:
    """Every file of the backup, compared with its digest, in a folder of the empty data directory.

    Raises `BackupFault` when the place is not empty or a file of the backup is not the one that was written.
    """
    _check_empty(target)
    target.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.data_dir.chmod(0o700)
    with _no_service(target.data_dir):
        made = target.data_dir / RESTORING
        shutil.rmtree(made, ignore_errors=True)  # of a restore that was killed
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
    if target.data_dir.exists():
        for one in target.data_dir.iterdir():
            if one.name not in MAY_BE_THERE and not (
                one.name in EMPTY_FOLDERS and not any(one.iterdir())
            ):
                raise BackupFault(
                    f"{target.data_dir} is not empty ({one.name}): restore into a new data directory"
                )
    if name_of(target.url, target.data_dir) != OWN and installation.look(target.url).is_used:
        raise BackupFault("the database is not empty: restore into a new one")


@contextmanager
def _no_service(data_dir: Path) -> Generator[None]:
    """None may start meanwhile: it holds the same lock."""
    with (data_dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupFault(f"a service or another restore runs on {data_dir}") from None
        yield


@contextmanager
def restored_rows(made: Path) -> Generator[Database]:
    """The rows of the backup, brought up to date with this version."""
    rows = Database(sqlite_url(made / ROWS))
    try:
        yield rows
        rows.truncate_log()  # everything is in the file itself, nothing in its log
    finally:
        rows.close()


def settle(made: Path, target: RestoreTarget, master_key: str | None) -> None:
    """Move what was prepared into place and fill the database: all of it, or nothing.

    `master_key`: of the backup, where the target has none.
    """
    with ExitStack() as undone:
        if name_of(target.url, target.data_dir) == OWN:
            with restored_rows(made) as rows, rows.read() as source:
                identity = _identity(source)
            _move(made / ROWS, target.data_dir / SQLITE_FILE, undone)
            _move_files(made, target, master_key, undone)
            _write_record(target, identity, undone)
        else:
            with (
                restored_rows(made) as rows,
                rows.read() as source,
                _opened(target) as database,
                database.write() as connection,
            ):
                copy_rows(source, connection)
                _move_files(made, target, master_key, undone)
                _write_record(target, _identity(source), undone)
        undone.pop_all()


def _identity(rows: sa.Connection) -> str:
    return rows.execute(sa.select(installation.installation.c.id)).scalar_one()


@contextmanager
def _opened(target: RestoreTarget) -> Generator[Database]:
    """The empty database with its tables, and no service on it."""
    database = Database(target.url)
    try:
        database.claim()
        yield database
    finally:
        database.close()


def _move_files(
    made: Path, target: RestoreTarget, master_key: str | None, undone: ExitStack
) -> None:
    _move(made / BLOBS, target.data_dir / BLOBS, undone)
    if (made / HEADS).exists() and not target.heads.exists():
        _move(made / HEADS, target.heads, undone)
    if master_key is not None:
        undone.callback(target.master_key.unlink, missing_ok=True)
        target.master_key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target.master_key, master_key)


def _move(source: Path, target: Path, undone: ExitStack) -> None:
    if target.is_dir():
        target.rmdir()  # it is empty
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    undone.callback(shutil.move, target, source)
    shutil.move(source, target)
    flush(target.parent)


def _write_record(target: RestoreTarget, identity: str, undone: ExitStack) -> None:
    """Without a number of starts: whatever the installation has seen since the backup, this is how it goes on."""
    undone.callback((target.data_dir / RECORD).unlink, missing_ok=True)
    write_private(target.data_dir / RECORD, f"id {identity}\n")
