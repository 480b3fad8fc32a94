"""Backs up an installation, with its service running or stopped: one snapshot of the rows, and every file they name.

The rows are copied by our own code from one read transaction: no PostgreSQL client program is needed, and a backup of
either database can be restored into either. While that transaction is open, files are hard-linked ("pinned") into a
folder of the backup, so that files deleted afterwards can still be copied.
"""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tuneship.host.durable import flush, write_private
from tuneship.host.file_digest import sha256_of
from tuneship.store.database.database import Database
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.stored_files import stored_objects
from tuneship.store.installation import installation
from tuneship.store.installation.backup_format import (
    BLOBS,
    KEY,
    UNFINISHED,
    BackupFault,
    BlobFile,
    Manifest,
    NamedFile,
    copy_file,
    copy_rows,
    is_half_written,
    only_one,
    read_manifest,
    rows_in,
    tidy,
)

# Prefix of the folders in `scratch` that hold the pins of a running backup.
PINS = "backup-"
# A file that is deleted together with its row just before it is pinned makes the backup take another snapshot.
SNAPSHOT_ATTEMPTS = 20


@dataclass(frozen=True)
class Source:
    """The installation that is backed up."""

    database: Database
    data_dir: Path
    heads: Path
    master_key: Path
    blobs: Blobs


@dataclass
class Backup:
    """Runs the backup once into one folder."""

    source: Source
    folder: Path
    now: datetime
    version: str
    # The complete backup that the folder already holds.
    previous: Manifest | None = None
    # Whether to read and compare the files that earlier backups copied.
    verifies: bool = False
    files: dict[str, BlobFile] = field(default_factory=dict[str, BlobFile])
    missing: list[str] = field(default_factory=list[str])
    # Number of files that the folder did not hold yet.
    copied: int = 0
    # The files of the previous backup that were found to be good: with `verifies` each is read once.
    _good: set[str] = field(default_factory=set[str])
    _pinned: set[str] = field(default_factory=set[str])

    @property
    def _stamp(self) -> str:
        return self.now.strftime("%Y%m%dT%H%M%S%f")

    def make(self, *, with_master_key: bool) -> Manifest:
        """Run the backup. If it raises `BackupFault`, `OSError` or SQLAlchemy's errors, the previous one is intact."""
        alone = only_one(
            self.source.data_dir / BLOBS, "another backup of this installation is being made"
        )
        with alone, self._unfinished():
            with self._pins() as pins:
                # The heads come before the rows: no head may name a row that the backup lacks.
                name, heads = f"audit-heads-{self._stamp}.jsonl", None
                with suppress(FileNotFoundError):
                    heads = NamedFile(name, copy_file(self.source.heads, self.folder / name))
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

    @contextmanager
    def _pins(self) -> Generator[Path]:
        """Make the folder for pins, on the file system of `blobs`; files of a bucket go straight into the backup."""
        if self.source.blobs.is_remote:
            self._download_all()
            yield self.folder / BLOBS
            return
        scratch = self.source.data_dir / "scratch"
        # Only one backup runs at a time, so these were left by a killed one.
        for leftover in scratch.glob(f"{PINS}*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=PINS, dir=scratch) as folder:
            yield Path(folder)

    def _download_all(self) -> None:
        """Download the currently named files before the snapshot, which must not stay open during the downloads."""
        with self.source.database.read() as connection:
            objects = list(stored_objects(connection))
        for stored in objects:
            for path, digest in stored.files.items():
                kept = self.folder / BLOBS / path
                # A damaged copy, or one that a killed backup left, must not pass for the file of the bucket.
                if not self._has(path, digest) and kept.exists() and sha256_of(kept) != digest:
                    kept.unlink()
                self._pin(path, digest, self.folder / BLOBS)

    def _identity(self) -> str:
        with self.source.database.read() as connection:
            identity = installation.id_of(connection)
        if identity is None:
            raise BackupFault("the database has no id: start the service once")
        return identity

    @contextmanager
    def _unfinished(self) -> Generator[None]:
        """Refuse a folder that holds something else; remove everything new again if the block raises."""
        identity = self._identity()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.previous = read_manifest(self.folder)
        mark = self.folder / UNFINISHED
        owner = self.previous.installation if self.previous else None
        if owner is None and mark.is_file():
            owner = mark.read_text().strip()
        if owner is None and not all(is_half_written(file) for file in self.folder.iterdir()):
            raise BackupFault(f"{self.folder} holds something else: name a new or empty folder")
        if owner not in (None, identity):
            raise BackupFault(
                f"{self.folder} holds the backup of another installation: name another"
            )
        kept_key = (self.folder / KEY).exists()
        write_private(mark, identity + "\n")
        try:
            yield
        except BaseException:
            if self.previous is None and not kept_key:
                (self.folder / KEY).unlink(missing_ok=True)
            tidy(self.folder, self.previous)
            raise

    def _copy_rows(self, pins: Path) -> tuple[NamedFile, dict[str, str]]:
        """Write the rows; returns their file, and the digests of all files that they name.

        Each of these files is in the previous backup, pinned, or in `missing`.
        """
        file = self.folder / f"rows-{self._stamp}.sqlite"
        for attempt in range(1, SNAPSHOT_ATTEMPTS + 1):
            with self.source.database.read() as connection:
                digests = {
                    path: digest
                    for stored in stored_objects(connection)
                    for path, digest in stored.files.items()
                }
                gone = {
                    path for path, digest in digests.items() if not self._pin(path, digest, pins)
                }
                # A second transaction shows the rows of now: files that it no longer names were deleted meanwhile,
                # and a new snapshot does without them. A file that is gone while a row still names it is missing.
                with self.source.database.read() as newer:
                    named = {path for stored in stored_objects(newer) for path in stored.files}
                if gone <= named or attempt == SNAPSHOT_ATTEMPTS:
                    self.missing += gone
                    with rows_in(file) as target, target.write() as copy:
                        copy_rows(connection, copy)
                    flush(file)
                    flush(self.folder)
                    return NamedFile(file.name, sha256_of(file)), digests
        raise AssertionError

    def _pin(self, path: str, digest: str, pins: Path) -> bool:
        """Make sure that the file can be copied later even if it is deleted; returns whether it exists."""
        pin = pins / path
        if self._has(path, digest) or pin.exists():
            return True
        pin.parent.mkdir(parents=True, exist_ok=True)
        if not self.source.blobs.copy_out(path, pin):
            return False
        self._pinned.add(path)
        return True

    def _has(self, path: str, digest: str) -> bool:
        """Whether the previous backup holds the file; a file never changes under its name."""
        if path in self._good:
            return True
        known = None if self.previous is None else self.previous.files.get(path)
        file = self.folder / BLOBS / path
        if known is None or known.sha256 != digest or not file.is_file():
            return False
        if file.stat().st_size != known.bytes:
            return False
        if self.verifies and sha256_of(file) != digest:
            return False
        self._good.add(path)
        return True

    def _copy_files(self, pins: Path, digests: dict[str, str]) -> None:
        """Copy the pinned files; a damaged one counts as missing."""
        (self.folder / BLOBS).mkdir(mode=0o700, exist_ok=True)
        for path, digest in digests.items():
            file, pin = self.folder / BLOBS / path, pins / path
            if path in self._pinned:
                if sha256_of(pin) != digest:
                    self.missing.append(path)
                    continue
                if pin != file:
                    copy_file(pin, file)
                self.copied += 1
            if path not in self.missing:
                self.files[path] = BlobFile(digest, file.stat().st_size)
