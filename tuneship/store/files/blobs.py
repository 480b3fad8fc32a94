"""The store for files of datasets, models, batches and jobs: its protocol, and the code that both implementations
share.

`local_blobs.py` keeps the files in the data directory, `object_blobs.py` in a bucket of an object store. A key is
`<kind>/<id>/<name>` with an id from the database; a client's file name is never used. A file never changes under its
key and is never there in part. It is sealed while it is staged (`tuneship/security/sealed_files.py`), so even a killed
upload leaves no plain text behind.
"""

import hashlib
import io
import tempfile
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tuneship.host.file_digest import sha256_of
from tuneship.host.startup import StartupError
from tuneship.security.sealed_files import ObjectDamaged, SealingWriter, new_key, open_plain

STAGED = ".staged-"
# The name of a dataset's file; it is sealed for this name.
DATA_FILE = "data.jsonl"
# The checkpoints of jobs that have not ended: one object for each job, in it a folder for each checkpoint.
CHECKPOINTS = "checkpoints"
# The first part of every key, below which each object has a folder.
KINDS = ("datasets", "models", "files", CHECKPOINTS)


class BlobsAway(Exception):
    """The store does not answer or refuses the service; the text names the kind of failure, and no address."""


class FileDamaged(ObjectDamaged):
    """A stored file does not match its digest."""

    def __init__(self, name: str) -> None:
        """`name`: the file's name."""
        super().__init__()
        self.name = name


class StoreRefused(StartupError):
    """The store cannot be used by this installation; the message says why."""


@dataclass(frozen=True)
class ObjectRef:
    """A stored dataset, model or batch file, as named by its row."""

    # `datasets/<id>`, `files/<id>` or `models/<job id>-<attempt>` (`models/<id>` of an imported model).
    prefix: str
    # SHA-256 of each file, by name.
    files: Mapping[str, str] = field(hash=False)

    def only(self, *names: str) -> "ObjectRef":
        """The same object with no other files than these."""
        kept = {name: self.files[name] for name in names if name in self.files}
        return ObjectRef(self.prefix, kept)


class Blobs(Protocol):
    """The files of datasets, models and batches. May be used from any thread; methods may wait for a disk or a network.

    Each raises `OSError`, and `BlobsAway` where the files are on another machine.
    """

    # Whether `fetched` may have to download.
    is_remote: bool
    # The folder or URL, for messages.
    place: str

    def staged(self) -> AbstractContextManager["StagedFile"]:
        """Yield a new file to write to; it is removed after the block unless `keep` has stored it."""
        ...

    def keep(self, file: "StagedFile", key: str) -> None:
        """Finish a staged file and store it durably under its key."""
        ...

    def put(self, path: Path, key: str) -> str:
        """Store a copy of a local file unchanged, sealed or not; returns its SHA-256."""
        ...

    def fetched(self, ref: ObjectRef, *, is_checked: bool = False) -> AbstractContextManager[Path]:
        """Yield the local folder of an object's files, which stay there within the block.

        `is_checked`: compare every file with its digest. Raises `FileDamaged` and `FileNotFoundError`.
        Never call it inside a write transaction: other writers would wait for the network.
        """
        ...

    def path_of(self, prefix: str) -> Path:
        """The local folder that `fetched` yields for an object; workers read it by this path."""
        ...

    def copy_out(self, path: str, target: Path) -> bool:
        """Make a file outlive its deletion by linking or copying it to `target`; returns whether it exists."""
        ...

    def digest_of(self, path: str) -> str:
        """SHA-256 of a stored file as it is now. Raises `FileNotFoundError`."""
        ...

    def delete(self, prefix: str) -> None:
        """Remove an object, if it exists."""
        ...

    def names(self) -> set[str]:
        """The prefixes of all objects that have files."""
        ...

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether at least one of these objects has files."""
        ...

    def older_than(self, moment: datetime) -> set[str]:
        """The prefixes of the objects that were last written before a moment."""
        ...

    def set_aside(self, names: Collection[str], now: datetime) -> str | None:
        """Move objects to a place where they stay until an operator removes them; return it, None without objects."""
        ...

    def sweep(self) -> None:
        """Remove the temporary files of a killed process; call it only when the service starts."""
        ...

    def check(self, identity: str | None, *, writes: bool = True) -> None:
        """Check, before anything is changed, that the store belongs to this installation and is writable.

        `identity`: the installation's id; None before its first start. Raises `StoreRefused`.
        """
        ...

    def claim(self, identity: str, known: Collection[str]) -> None:
        """Bind the store to an installation, which `known` objects belong to. Raises `StoreRefused`."""
        ...


class StagedFile:
    """A sealed file that no row names yet: written once from start to end, finished, then read."""

    def __init__(self, folder: Path) -> None:
        """Create an empty file under a new name in `folder`, with a new data key."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=STAGED)
        self.path = Path(name)
        self.key = new_key()
        # Bytes written so far; the sealed file is a little longer.
        self.size = 0
        self._content = hashlib.sha256()
        self._file = HashedFile(descriptor, "wb")
        self._writer = SealingWriter(self._file, self.key, DATA_FILE)
        self._is_dropped = False

    def write(self, block: "bytes | memoryview") -> None:
        """Append plain bytes. Raises `OSError`."""
        self._content.update(block)
        self.size += len(block)
        if not self._is_dropped:
            self._writer.write(block)

    def drop(self) -> None:
        """Remove the written bytes. Further bytes are only hashed, and the file can no longer be kept."""
        self._is_dropped = True
        # The file is removed next, so a failure to finish it does not matter.
        with suppress(OSError):
            self.finish()
        self.path.unlink(missing_ok=True)

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


class HashedFile(io.FileIO):
    """A file that hashes all bytes written to it."""

    def __init__(self, descriptor: int, mode: str) -> None:
        """Take over an open descriptor."""
        super().__init__(descriptor, mode)
        self.digest = hashlib.sha256()

    def write(self, block: Any, /) -> int:
        written = super().write(block)
        self.digest.update(memoryview(block)[:written])
        return written


@contextmanager
def staged_in(folder: Path) -> Generator[StagedFile]:
    """Yield a new staged file in a folder, which is removed after the block unless it was moved away."""
    file = StagedFile(folder)
    try:
        yield file
    finally:
        file.drop()


def check_digest(path: Path, sha256: str) -> None:
    """Compare a stored file with its digest. Raises `FileDamaged` if they differ, and `OSError`."""
    if sha256_of(path) != sha256:
        raise FileDamaged(path.name)
