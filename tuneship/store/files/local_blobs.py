"""The store of files in the data directory. A file is staged, flushed to disk, then moved into place.

The files are read where they are: fetching copies nothing.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Collection, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from tuneship.host.durable import flush
from tuneship.host.file_digest import sha256_of
from tuneship.store.database.write_queue import refuse_while_writing
from tuneship.store.files.blobs import (
    KINDS,
    STAGED,
    HashedFile,
    ObjectRef,
    StagedFile,
    check_digest,
    staged_in,
)
from tuneship.store.files.quarantine import set_aside

# The folder in the data directory, with a folder for each kind of object.
FOLDER = "blobs"
# Exists in every folder that is the root of a file system.
LOST_FOUND = "lost+found"


class LocalBlobs:
    """Files below `<data dir>/blobs`. Obeys `Blobs`."""

    is_remote = False

    def __init__(self, data_dir: Path) -> None:
        """Stage files in `<data dir>/scratch`, which must be on the same file system."""
        self._data_dir = data_dir
        self._root = data_dir / FOLDER
        self._scratch = data_dir / "scratch"
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.place = str(self._root)

    def staged(self) -> AbstractContextManager[StagedFile]:
        """Yield a new file to write to; it is removed after the block unless `keep` has stored it."""
        return staged_in(self._scratch)

    def keep(self, file: StagedFile, key: str) -> None:
        """Finish a staged file, flush it to disk and move it to its key. Raises `OSError`."""
        file.finish()
        self._move(file.path, key)

    def put(self, path: Path, key: str) -> str:
        """Copy a local file unchanged, sealed or not, to a key; returns its SHA-256. Raises `OSError`."""
        descriptor, name = tempfile.mkstemp(dir=self._scratch, prefix=STAGED)
        try:
            # On a nearly full disk a raw write may take only part of a block; the buffer writes the rest or raises.
            with (
                HashedFile(descriptor, "wb") as raw,
                path.open("rb") as source,
                io.BufferedWriter(raw) as copy,
            ):
                shutil.copyfileobj(source, copy)
            self._move(Path(name), key)
        finally:
            Path(name).unlink(missing_ok=True)
        return raw.digest.hexdigest()

    def _move(self, source: Path, key: str) -> None:
        flush(source)
        target = self._root / key
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        source.replace(target)
        # Flushing both folders makes the new name, and a folder created for it, survive a power failure.
        flush(target.parent)
        flush(target.parent.parent)

    @contextmanager
    def fetched(self, ref: ObjectRef, *, is_checked: bool = False) -> Generator[Path]:
        """Yield the object's own folder. Without `is_checked` nothing is read, so a missing file is found later."""
        refuse_while_writing()
        folder = self.path_of(ref.prefix)
        if is_checked:
            for name, sha256 in ref.files.items():
                check_digest(folder / name, sha256)
        yield folder

    def path_of(self, prefix: str) -> Path:
        """The folder of an object."""
        return self._root / prefix

    def copy_out(self, path: str, target: Path) -> bool:
        """Link a file to `target`, or copy it there; returns whether it exists. Raises `OSError`."""
        source = self._root / path
        try:
            os.link(source, target)
        except FileNotFoundError:
            return False
        except OSError:  # no hard links here, or `blobs` is on another file system
            with suppress(FileNotFoundError):
                shutil.copy(source, target)
            return target.exists()
        return True

    def digest_of(self, path: str) -> str:
        """SHA-256 of a stored file. Raises `OSError`."""
        return sha256_of(self._root / path)

    def delete(self, prefix: str) -> None:
        """Remove an object's folder, if it exists. Raises `OSError`."""
        folder = self._root / prefix
        if folder.exists():
            shutil.rmtree(folder)

    def names(self) -> set[str]:
        """The prefixes of all objects that have a folder."""
        folders = object_folders(self._root, KINDS)
        return {f"{folder.parent.name}/{folder.name}" for folder in folders}

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether at least one of these objects has a folder."""
        return any((self._root / name).exists() for name in names)

    def older_than(self, moment: datetime) -> set[str]:
        """The prefixes of objects whose folders were last changed before a moment."""
        found: set[str] = set()
        for folder in object_folders(self._root, KINDS):
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                if datetime.fromtimestamp(folder.stat().st_mtime, UTC) < moment:
                    found.add(f"{folder.parent.name}/{folder.name}")
        return found

    def set_aside(self, names: Collection[str], now: datetime) -> str | None:
        """Move folders to `<data dir>/set-aside`; returns the new folder there. Raises `OSError`."""
        place = set_aside(self._data_dir, names, now)
        return None if place is None else str(place)

    def sweep(self) -> None:
        """Remove the staged files that a killed process left."""
        for leftover in self._scratch.glob(f"{STAGED}*"):
            leftover.unlink(missing_ok=True)

    def check(self, identity: str | None, *, writes: bool = True) -> None:
        """Do nothing: the record beside the database guards this folder (`ownership.py`)."""

    def claim(self, identity: str, known: Collection[str]) -> None:
        """Do nothing, for the same reason."""


def object_folders(root: Path, kinds: Iterable[str]) -> list[Path]:
    """The folders of all objects of these kinds below a folder."""
    return [
        folder
        for kind in kinds
        if (root / kind).is_dir()
        for folder in (root / kind).iterdir()
        if folder.name != LOST_FOUND
    ]
