"""Files under generated names: staged, flushed to disk, then moved into place, so that none is ever half there.

The root is an fsspec URL; local folders are the default. A key is `<kind>/<id>/<name>` with an id from the database:
a client's file name is never used.
"""

import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from tuneship.store.private_files import flush_folder

BLOCK = 1 << 16


class StagedFile(io.BufferedRandom):
    """A file that nothing refers to yet. Written from start to end, and hashed meanwhile; then it may be read."""

    def __init__(self, path: Path) -> None:
        """Open `path` empty."""
        super().__init__(io.FileIO(path, "w+b"), BLOCK)
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, block: Any, /) -> int:
        """Append bytes."""
        self._digest.update(block)
        self.size += len(block)
        return super().write(block)

    @property
    def sha256(self) -> str:
        """Of everything written."""
        return self._digest.hexdigest()


class Blobs:
    """Binary objects below one root."""

    def __init__(self, root: str, scratch: Path) -> None:
        """`root`: folder or fsspec URL; `scratch`: local folder for staged and fetched files."""
        core: Any = fsspec.core  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self._files, self._root = core.url_to_fs(root)
        self._is_local = "file" in str(self._files.protocol)
        self._scratch = scratch
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def staged(self) -> Generator[StagedFile]:
        """A file to write to; removed unless `keep` took it."""
        descriptor, name = tempfile.mkstemp(dir=self._scratch, prefix=".staged-")
        try:
            os.close(descriptor)
            with StagedFile(Path(name)) as file:
                yield file
        finally:
            Path(name).unlink(missing_ok=True)

    def keep(self, file: BinaryIO, key: str) -> None:
        """Flush a staged file to disk and move it to its key."""
        file.flush()
        os.fsync(file.fileno())
        self._move(Path(str(file.name)), key)

    def put(self, path: Path, key: str) -> str:
        """Copy a finished local file to its key; answers its SHA-256."""
        with self.staged() as staged, path.open("rb") as source:
            while block := source.read(BLOCK):
                staged.write(block)
            self.keep(staged, key)
        return staged.sha256

    def _move(self, source: Path, key: str) -> None:
        target = f"{self._root}/{key}"
        if not self._is_local:
            self._files.put_file(str(source), target)
            return
        folder = Path(target).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        source.replace(target)
        for one in (
            folder,
            folder.parent,
        ):  # the rename, and a folder made for it, survive power loss
            flush_folder(one)

    def local(self, key: str) -> Path:
        """A local path of the object, or of the folder of objects, to read from."""
        target = f"{self._root}/{key}"
        if self._is_local:
            return Path(target)
        fetched = self._scratch / "fetched" / key
        if not fetched.exists():
            self._files.get(target, str(fetched), recursive=self._files.isdir(target))
        return fetched

    def delete(self, key: str) -> None:
        """Remove an object or a folder of them; nothing happens when it is not there."""
        target = f"{self._root}/{key}"
        if self._files.exists(target):
            self._files.rm(target, recursive=self._files.isdir(target))

    def names(self, kind: str) -> set[str]:
        """The ids of one kind that have files here."""
        folder = f"{self._root}/{kind}"
        if not self._files.exists(folder):
            return set()
        return {Path(one).name for one in self._files.ls(folder, detail=False)}

    def sweep(self) -> None:
        """Remove what a killed process left staged; call it at start only."""
        for leftover in self._scratch.glob(".staged-*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(self._scratch / "fetched", ignore_errors=True)


def sha256_of(path: Path) -> str:
    """The digest of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
