"""Files under generated names: staged, flushed to disk, then moved into place, so that none is ever half there.

What is staged is sealed while it is written (`tuneship/security/sealed_files.py`): even a killed upload leaves no
plain text behind. The root is an fsspec URL; local folders are the default. A key is `<kind>/<id>/<name>` with an id
from the database: a client's file name is never used.
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
# The name of a dataset's file, which its seal is bound to.
DATA_FILE = "data.jsonl"


class StagedFile:
    """A file that nothing refers to yet. Written from start to end, sealed and hashed meanwhile; then it is read."""

    def __init__(self, folder: Path) -> None:
        """An empty file under a new name in `folder`, with a key of its own."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=STAGED)
        self.path = Path(name)
        self.key = new_key()
        self.size = 0
        """Bytes that were written; sealed they are a few more."""
        self._content = hashlib.sha256()
        self._file = _HashedFile(descriptor, "wb")
        self._writer = SealingWriter(self._file, self.key, DATA_FILE)

    def write(self, block: "bytes | memoryview") -> None:
        """Append bytes. Raises `OSError`."""
        self._content.update(block)
        self.size += len(block)
        self._writer.write(block)

    def finish(self) -> None:
        """Nothing more comes; nothing happens the second time. Raises `OSError`."""
        self._writer.close()

    def open(self) -> BinaryIO:
        """What was written, once it is finished."""
        return open_plain(self.path, self.key, DATA_FILE)

    @property
    def content_sha256(self) -> str:
        """Of everything written."""
        return self._content.hexdigest()

    @property
    def sha256(self) -> str:
        """Of the sealed file, once it is finished."""
        return self._file.digest.hexdigest()


class _HashedFile(io.FileIO):
    def __init__(self, descriptor: int, mode: str) -> None:
        super().__init__(descriptor, mode)
        self.digest = hashlib.sha256()

    def write(self, block: Any, /) -> int:
        written = super().write(block)
        self.digest.update(memoryview(block)[:written])
        return written


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
        file = StagedFile(self._scratch)
        try:
            yield file
        finally:
            with suppress(OSError):  # of a file that is thrown away
                file.finish()
            file.path.unlink(missing_ok=True)

    def keep(self, file: StagedFile, key: str) -> None:
        """Flush a staged file to disk and move it to its key."""
        file.finish()
        self._settle(file.path, key)

    def put(self, path: Path, key: str) -> str:
        """Copy a finished local file as it is, sealed or not, to its key; answers its SHA-256."""
        descriptor, name = tempfile.mkstemp(dir=self._scratch, prefix=STAGED)
        try:
            raw = _HashedFile(descriptor, "wb")
            # A disk with little room left takes a part of a block; the buffer gives it the rest, or raises.
            with path.open("rb") as source, io.BufferedWriter(raw) as copy:
                shutil.copyfileobj(source, copy)
            self._settle(Path(name), key)
        finally:
            Path(name).unlink(missing_ok=True)
        return raw.digest.hexdigest()

    def _settle(self, source: Path, key: str) -> None:
        flush(source)
        self._move(source, key)

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
        ):  # the rename, and a folder made for it, outlive power loss
            flush(one)

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
        for leftover in self._scratch.glob(f"{STAGED}*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(self._scratch / "fetched", ignore_errors=True)


def blobs_of(data_dir: Path) -> Blobs:
    """Those of a service's data directory."""
    return Blobs(str(data_dir / "blobs"), data_dir / "scratch")


def check_digest(path: Path, sha256: str) -> None:
    """Raises `ObjectDamaged` when a stored file is not the one that was stored, and `OSError`."""
    if sha256_of(path) != sha256:
        raise ObjectDamaged


def sha256_of(path: Path) -> str:
    """The digest of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
