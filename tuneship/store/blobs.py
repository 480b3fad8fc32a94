"""Stores files under generated names. A file is staged, flushed to disk, then moved into place: it is never partial.

A staged file is sealed while it is written (`tuneship/security/sealed_files.py`), so even a killed upload leaves no
plain text behind. The root is an fsspec URL; local folders are the default. A key is `<kind>/<id>/<name>` with an id
from the database; a client's file name is never used.
"""

import hashlib
import io
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from tuneship.host.durable import flush
from tuneship.security.sealed_files import ObjectDamaged, SealingWriter, new_key, open_plain

STAGED = ".staged-"
# The name of a dataset's file; it is sealed for this name.
DATA_FILE = "data.jsonl"


class StagedFile:
    """A sealed file that no row names yet: written once from start to end, finished, then read."""

    def __init__(self, folder: Path) -> None:
        """Create an empty file under a new name in `folder`, with a new data key."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=STAGED)
        self.path = Path(name)
        self.key = new_key()
        self.size = 0
        """Bytes written so far; the sealed file is a little longer."""
        self._content = hashlib.sha256()
        self._file = _HashedFile(descriptor, "wb")
        self._writer = SealingWriter(self._file, self.key, DATA_FILE)

    def write(self, block: "bytes | memoryview") -> None:
        """Append plain bytes. Raises `OSError`."""
        self._content.update(block)
        self.size += len(block)
        self._writer.write(block)

    def finish(self) -> None:
        """Write the end of the file and close it; a second call does nothing. Raises `OSError`."""
        self._writer.close()

    def open(self) -> BinaryIO:
        """Open the finished file for reading its plain bytes."""
        return open_plain(self.path, self.key, DATA_FILE)

    @property
    def content_sha256(self) -> str:
        """SHA-256 of the plain bytes."""
        return self._content.hexdigest()

    @property
    def sha256(self) -> str:
        """SHA-256 of the sealed file; valid once it is finished."""
        return self._file.digest.hexdigest()


class _HashedFile(io.FileIO):
    """A file that hashes the bytes written to it."""

    def __init__(self, descriptor: int, mode: str) -> None:
        super().__init__(descriptor, mode)
        self.digest = hashlib.sha256()

    def write(self, block: Any, /) -> int:
        written = super().write(block)
        self.digest.update(memoryview(block)[:written])
        return written


class Blobs:
    """The files of datasets and models, below one root."""

    def __init__(self, root: str, scratch: Path) -> None:
        """Use `root`, a folder or fsspec URL, and `scratch`, a local folder for staged and fetched files."""
        core: Any = fsspec.core  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self._files, self._root = core.url_to_fs(root)
        self._is_local = "file" in str(self._files.protocol)
        self._scratch = scratch
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def staged(self) -> Generator[StagedFile]:
        """Yield a new file to write to, which is removed after the block unless `keep` moved it."""
        file = StagedFile(self._scratch)
        try:
            yield file
        finally:
            with suppress(
                OSError
            ):  # the file is removed next, so a failure to finish it does not matter
                file.finish()
            file.path.unlink(missing_ok=True)

    def keep(self, file: StagedFile, key: str) -> None:
        """Finish a staged file, flush it to disk and move it to its key. Raises `OSError`."""
        file.finish()
        self._move(file.path, key)

    def put(self, path: Path, key: str) -> str:
        """Copy a local file unchanged, sealed or not, to a key; returns its SHA-256. Raises `OSError`."""
        descriptor, name = tempfile.mkstemp(dir=self._scratch, prefix=STAGED)
        try:
            raw = _HashedFile(descriptor, "wb")
            # On a nearly full disk a raw write may take only part of a block; the buffer writes the rest or raises.
            with path.open("rb") as source, io.BufferedWriter(raw) as copy:
                shutil.copyfileobj(source, copy)
            self._move(Path(name), key)
        finally:
            Path(name).unlink(missing_ok=True)
        return raw.digest.hexdigest()

    def _move(self, source: Path, key: str) -> None:
        flush(source)
        target = f"{self._root}/{key}"
        if not self._is_local:
            self._files.put_file(str(source), target)
            return
        folder = Path(target).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        source.replace(target)
        # Flushing both folders makes the new name, and a folder created for it, survive a power failure.
        flush(folder)
        flush(folder.parent)

    def local(self, key: str) -> Path:
        """A local path from which an object, or a folder of objects, can be read."""
        target = f"{self._root}/{key}"
        if self._is_local:
            return Path(target)
        fetched = self._scratch / "fetched" / key
        if not fetched.exists():
            self._files.get(target, str(fetched), recursive=self._files.isdir(target))
        return fetched

    def delete(self, key: str) -> None:
        """Remove an object or a folder of objects, if it exists."""
        target = f"{self._root}/{key}"
        if self._files.exists(target):
            self._files.rm(target, recursive=self._files.isdir(target))

    def names(self, kind: str) -> set[str]:
        """The ids of all objects of one kind (`datasets`, `models`) that have files."""
        folder = f"{self._root}/{kind}"
        if not self._files.exists(folder):
            return set()
        return {Path(path).name for path in self._files.ls(folder, detail=False)}

    def sweep(self) -> None:
        """Remove the staged files that a killed process left; call it only when the service starts."""
        for leftover in self._scratch.glob(f"{STAGED}*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(self._scratch / "fetched", ignore_errors=True)


def blobs_of(data_dir: Path) -> Blobs:
    """Open the blob store of a data directory."""
    return Blobs(str(data_dir / "blobs"), data_dir / "scratch")


def check_digest(path: Path, sha256: str) -> None:
    """Compare a stored file with its digest. Raises `ObjectDamaged` if they differ, and `OSError`."""
    if sha256_of(path) != sha256:
        raise ObjectDamaged


def sha256_of(path: Path) -> str:
    """SHA-256 of a local file, in hexadecimal. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
