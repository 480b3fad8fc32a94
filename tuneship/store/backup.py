"""Makes a backup of an installation, while its service runs or not: one view of the rows, and every file they name.

The rows are copied by our own code from one transaction that reads: no client program of PostgreSQL is needed, and a
backup of either database can be restored into either. Files are linked, while that view is opened, into a folder of
ours: what is deleted from then on is still there for the backup.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa

from tuneship.host.durable import flush, write_private
from tuneship.store import installation
from tuneship.store.backup_format import (
    BLOBS,
    KEY,
    UNFINISHED,
    BackupFault,
    BlobFile,
    Manifest,
    NamedFile,
    copy_file,
    copy_rows,
    read_manifest,
    tidy,
)
from tuneship.store.blobs import sha256_of
from tuneship.store.database import Database, sqlite_url
from tuneship.store.stored_files import stored_objects

# Folders in `scratch` with links to the files of a backup that is being made.
PINS = "backup-"
# A file whose row is deleted in the moment in which it is to be linked makes the backup look
# again.
TRIES = 20


@dataclass(frozen=True)
class Source:
    """What is backed up."""

    database: Database
    data_dir: Path
    heads: Path
    master_key: Path


@dataclass
class Backup:
    """One run into one folder."""

    source: Source
    folder: Path
    now: datetime
    version: str
    before: Manifest | None = None
    """What the folder holds so far."""
    verifies: bool = False
    """Read again what was copied before."""
    files: dict[str, BlobFile] = field(default_factory=dict[str, BlobFile])
    missing: list[str] = field(default_factory=list[str])
    copied: int = 0
    """Files that were not in the folder yet."""

    @property
    def _stamp(self) -> str:
        return self.now.strftime("%Y%m%dT%H%M%S%f")

    def make(self, *, with_master_key: bool) -> Manifest:
        """Raises `BackupFault`, `OSError`, SQLAlchemy's errors: then the backup before is as it was."""
        with _alone(self.source.data_dir), self._unfinished():
            with _pins(self.source.data_dir) as pins:
                heads = (
                    self._copy_heads()
                )  # before the rows: no head may name a row that is not there
                rows, digests = self._copy_rows(pins)
                self._copy_files(pins, digests)
            if with_master_key:
                write_private(self.folder / KEY, self.source.master_key.read_text())
            manifest = Manifest(
                installation=self._identity(),
                made_at=self.now.isoformat(timespec="seconds"),
                version=self.version,
                rows=rows,
                heads=heads,
                has_master_key=(self.folder / KEY).exists(),
                files=self.files,
                missing=sorted(self.missing),
            )
            manifest.write(self.folder)
        tidy(self.folder, manifest)
        return manifest

    def _identity(self) -> str:
        with self.source.database.read() as connection:
            found = connection.scalar(sa.select(installation.installation.c.id))
        if found is None:
            raise BackupFault("the database has no id: start the service once")
        return found

    @contextmanager
    def _unfinished(self) -> Generator[None]:
        """Refuses a folder that holds something else; takes everything new away again unless it was finished."""
        identity = self._identity()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.before = read_manifest(self.folder)
        mark = self.folder / UNFINISHED
        whose = self.before.installation if self.before else None
        if whose is None and mark.is_file():
            whose = mark.read_text().strip()
        if whose is None and any(self.folder.iterdir()):
            raise BackupFault(f"{self.folder} holds something else: name a new or empty folder")
        if whose not in (None, identity):
            raise BackupFault(
                f"{self.folder} holds the backup of another installation: name another"
            )
        kept_key = (self.folder / KEY).exists()
        write_private(mark, identity + "\n")
        try:
            yield
        except BaseException:
            if self.before is None and not kept_key:
                (self.folder / KEY).unlink(missing_ok=True)
            tidy(self.folder, self.before)
            raise

    def _copy_heads(self) -> NamedFile | None:
        name = f"audit-heads-{self._stamp}.jsonl"
        try:
            return NamedFile(name, copy_file(self.source.heads, self.folder / name))
        except FileNotFoundError:
            return None

    def _copy_rows(self, pins: Path) -> tuple[NamedFile, dict[str, str]]:
        """The rows, and the digests of the files that they name, each of which is linked, copied or missing."""
        for number in range(TRIES):
            with self.source.database.read() as connection:
                digests = {
                    path: digest
                    for one in stored_objects(connection)
                    for path, digest in one.files.items()
                }
                gone = {
                    path for path, digest in digests.items() if not self._secure(path, digest, pins)
                }
                if gone <= self._still_named() or number == TRIES - 1:
                    self.missing += gone
                    name = f"rows-{self._stamp}.sqlite"
                    _write_rows(connection, self.folder / name)
                    break
        else:
            raise AssertionError
        return NamedFile(name, sha256_of(self.folder / name)), digests

    def _still_named(self) -> set[str]:
        """Paths that rows name now, in a view of its own."""
        with self.source.database.read() as connection:
            return {path for one in stored_objects(connection) for path in one.files}

    def _secure(self, path: str, digest: str, pins: Path) -> bool:
        """See to it that the file can be copied later, whoever deletes it; answers whether it is there."""
        pin = pins / path
        if self._has(path, digest) or pin.exists():
            return True
        pin.parent.mkdir(parents=True, exist_ok=True)
        original = self.source.data_dir / BLOBS / path
        try:
            os.link(original, pin)
        except FileNotFoundError:
            return False
        except OSError:  # the file system has no links, or `blobs` is one of its own
            with suppress(FileNotFoundError):
                shutil.copy(original, pin)
            return pin.exists()
        return True

    def _has(self, path: str, digest: str) -> bool:
        """Whether the backup before holds the file; a file under a name never changes."""
        known = None if self.before is None else self.before.files.get(path)
        file = self.folder / BLOBS / path
        if known is None or known.sha256 != digest or not file.is_file():
            return False
        if file.stat().st_size != known.bytes:
            return False
        return not self.verifies or sha256_of(file) == digest

    def _copy_files(self, pins: Path, digests: dict[str, str]) -> None:
        (self.folder / BLOBS).mkdir(mode=0o700, exist_ok=True)
        for path, digest in digests.items():
            file, pin = self.folder / BLOBS / path, pins / path
            if pin.exists():
                if sha256_of(pin) != digest:
                    self.missing.append(path)
                    continue
                copy_file(pin, file)
                self.copied += 1
            if path not in self.missing:
                self.files[path] = BlobFile(digest, file.stat().st_size)


def _write_rows(connection: sa.Connection, file: Path) -> None:
    target = Database(sqlite_url(file))
    try:
        with target.write() as copy:
            copy_rows(connection, copy)
        target.truncate_log()  # everything is in the file itself, nothing in its log
    finally:
        target.close()
    flush(file)
    flush(file.parent)


@contextmanager
def _alone(data_dir: Path) -> Generator[None]:
    """One backup of an installation at a time."""
    folder = os.open(data_dir / BLOBS, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupFault("another backup of this installation is being made") from None
        yield
    finally:
        os.close(folder)


@contextmanager
def _pins(data_dir: Path) -> Generator[Path]:
    """A folder for links, on the files' own file system where `blobs` is not mounted apart."""
    scratch = data_dir / "scratch"
    for left in scratch.glob(f"{PINS}*"):  # of a backup that was killed: there is one at a time
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=PINS, dir=scratch) as made:
        yield Path(made)
