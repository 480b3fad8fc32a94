"""Local copies of an object store's files, up to a number of bytes; the least recently used ones are removed first.

The commands and the service may use it at the same time, so it keeps no state but the files themselves: a file's
modification time is its last use, and a shared lock on it keeps it from being evicted. The kernel ends the locks of a
killed process.
"""

import fcntl
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tuneship.host.durable import flush
from tuneship.host.file_digest import sha256_of
from tuneship.store.files.blobs import KINDS, STAGED, FileDamaged, HashedFile, ObjectRef

# Below the data directory. Workers may read the folders of `objects`; what is not complete is in `incoming`.
OBJECTS, INCOMING = Path("cache", "objects"), Path("cache", "incoming")

# Writes the file of a key.
Download = Callable[[str, BinaryIO], None]


class BlobCache:
    """The folder of local copies, laid out as the store is."""

    def __init__(self, data_dir: Path, maximum_bytes: int) -> None:
        """Create the folders, which must be on one file system."""
        self.root = data_dir / OBJECTS
        # Files that are not complete: downloads, and uploads before they become copies of their own.
        self.incoming = data_dir / INCOMING
        self._maximum_bytes = maximum_bytes
        # A worker's rights are bound to these folders themselves, so they are never removed and made again.
        for folder in (*(self.root / kind for kind in KINDS), self.incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def held(self, ref: ObjectRef, download: Download, *, is_checked: bool) -> Generator[Path]:
        """Yield the folder of an object; its files stay there within the block.

        `is_checked`: compare files that are here already with their digests, and download damaged ones again.
        Raises `FileDamaged` if a downloaded file has another digest, `OSError`, and whatever `download` raises.
        """
        with ExitStack() as pins:
            for name, sha256 in ref.files.items():
                key, wanted = f"{ref.prefix}/{name}", sha256 if is_checked else None
                pin = self._pinned(key, wanted)
                if pin is None:
                    with self._turn(hashlib.sha256(key.encode()).hexdigest()):
                        # Somebody else may have downloaded the file while this thread waited for its turn.
                        pin = self._pinned(key, wanted) or self._added(key, sha256, download)
                pins.enter_context(pin)
            yield self.root / ref.prefix

    def _pinned(self, key: str, sha256: str | None) -> io.FileIO | None:
        """Open and lock a file that is here; None if it is not, or if its digest is not the one that is given."""
        path = self.root / key
        with ExitStack() as opened:
            try:
                file = opened.enter_context(path.open("rb", buffering=0))
            except FileNotFoundError:
                return None
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file.fileno()).st_nlink == 0:  # it was evicted just before the lock
                return None
            if sha256 is not None and sha256_of(path) != sha256:
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
            opened.pop_all()
        return file

    def _added(self, key: str, sha256: str, download: Download) -> io.FileIO:
        """Download a file and move it into place, already locked, so that nobody can evict it in between."""
        descriptor, name = tempfile.mkstemp(dir=self.incoming, prefix=STAGED)
        with ExitStack() as undo:
            undo.callback(Path(name).unlink, missing_ok=True)
            file = undo.enter_context(HashedFile(descriptor, "wb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            # On a nearly full disk a raw write may take only part of a block; the buffer writes the rest or raises.
            buffer = io.BufferedWriter(file)
            download(key, buffer)
            buffer.detach()  # which flushes it, and leaves the file and its lock open
            if file.digest.hexdigest() != sha256:
                raise FileDamaged(key.rpartition("/")[2])
            self.add(Path(name), key)
            undo.pop_all()
        return file

    def add(self, file: Path, key: str) -> None:
        """Move a complete file into place, after making room for it. Raises `OSError`."""
        flush(file)
        target = self.root / key
        with self._turn("move"):
            files = [(one.stat(), one) for one in self.root.glob("*/*/*")]
            total = file.stat().st_size + sum(found.st_size for found, _ in files)
            # Those that were used longest ago make room.
            for found, path in sorted(files, key=lambda one: one[0].st_mtime_ns):
                if total <= self._maximum_bytes:
                    break
                if _remove_unused(path):
                    total -= found.st_size
                    with suppress(OSError):  # the object has other files
                        path.parent.rmdir()
            target.parent.mkdir(mode=0o700, exist_ok=True)
            file.replace(target)

    @contextmanager
    def _turn(self, name: str) -> Generator[None]:
        """Hold a lock that other threads and processes wait for."""
        with (self.incoming / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def forget(self, prefix: str) -> None:
        """Remove the copies of a deleted object, even while they are read."""
        shutil.rmtree(self.root / prefix, ignore_errors=True)

    def sweep(self) -> None:
        """Remove unfinished files of killed processes."""
        for leftover in self.incoming.iterdir():
            _remove_unused(leftover)


def _remove_unused(path: Path) -> bool:
    """Remove a file unless it is locked; return whether it is removed."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
    return True
