"""The store of files in a bucket of an object store: S3 and compatible ones, Google Cloud Storage, Azure.

Files are sealed on this machine and uploaded sealed. They are read from local copies (`blob_cache.py`), which are
compared with the digest of the row while they are downloaded. A mark in the bucket holds the id of the installation
that it belongs to. The only module that imports obstore, whose threads start with the first call: nothing may fork
this process afterwards, only start programs.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from tuneship.contract.common import count
from tuneship.store.database.write_queue import refuse_while_writing
from tuneship.store.files.blob_cache import BlobCache
from tuneship.store.files.blobs import (
    KINDS,
    STAGED,
    BlobsAway,
    ObjectRef,
    StagedFile,
    StoreRefused,
    staged_in,
)

if TYPE_CHECKING:  # these exist for type checkers only
    from obstore.store import ClientConfig, RetryConfig

# The object that says to which installation the others belong.
MARK = "tuneship-installation"
SET_ASIDE = "set-aside"
# A larger file is uploaded in parts of this size, the smallest that S3 takes. A part must pass within the timeout, also
# over a slow line, and this many at once are kept in memory.
PART_BYTES, PARTS_AT_ONCE = 5 << 20, 4
READ_BYTES = 1 << 20
# Three tries within about ten seconds: long enough for a short failure, and no request waits longer.
RETRIES: "RetryConfig" = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
CLIENT: "ClientConfig" = {
    "connect_timeout": timedelta(seconds=3),
    # Between two answers of the store. The whole of a big file may take an hour.
    "read_timeout": timedelta(seconds=10),
    "timeout": timedelta(hours=1),
    # An endpoint without TLS is the operator's own choice (AWS_ENDPOINT_URL): the files are sealed and requests signed.
    "allow_http": True,
}
# Errors of obstore carry addresses and whole answers; these two parts of their text say enough, and nothing private.
FAILURES = (re.compile(r"<Code>(\w+)</Code>"), re.compile(r"(status code: \d+)"))

# Entries of a list in one piece.
LIST_PAGE = 1_000

logger = logging.getLogger(__name__)


class ObjectBlobs:
    """Files below a prefix of a bucket. Obeys `Blobs`."""

    is_remote = True

    def __init__(self, url: str, cache: BlobCache) -> None:
        """Open `url`, e.g. `s3://bucket/prefix`, without any request. Raises `StoreRefused` for a URL of another kind.

        Credentials come from the cloud's own environment variables.
        """
        self.place = url
        self._cache = cache
        try:
            self._store: Any = from_url(url, client_options=CLIENT, retry_config=RETRIES)
        except (BaseError, ValueError):
            raise StoreRefused(f"blob_url: {url} does not name a bucket that can be used") from None

    # Writing.

    def staged(self) -> AbstractContextManager[StagedFile]:
        """Yield a new file to write to; it is removed after the block unless `keep` has stored it."""
        # Where `keep` can move it to its place among the copies, which may lie on a disk of their own.
        return staged_in(self._cache.incoming)

    def keep(self, file: StagedFile, key: str) -> None:
        """Finish a staged file and upload it. Raises `OSError`, `BlobsAway`."""
        file.finish()
        self._upload(key, file.path)
        # A dataset is read soon after its upload, so the file becomes its own local copy.
        with suppress(OSError):
            self._cache.add(file.path, key)

    def put(self, path: Path, key: str) -> str:
        """Upload a local file unchanged, sealed or not; returns its SHA-256. Raises `OSError`, `BlobsAway`."""
        digest = hashlib.sha256()

        def blocks(file: BinaryIO) -> Iterator[bytes]:
            while block := file.read(READ_BYTES):
                digest.update(block)
                yield block

        with path.open("rb") as file:
            # Hashed as it is uploaded: the digest is that of the bytes in the store, whatever happens to the file.
            is_small = path.stat().st_size <= PART_BYTES
            self._upload(key, b"".join(blocks(file)) if is_small else blocks(file))
        return digest.hexdigest()

    def _upload(self, key: str, content: "Path | bytes | Iterator[bytes]") -> None:
        with self._asked():
            # An object appears whole, at the end of its upload.
            obstore.put(
                self._store, key, content, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )

    # Reading.

    @contextmanager
    def fetched(self, ref: ObjectRef, *, is_checked: bool = False) -> Generator[Path]:
        """Yield a local folder with the object's files; missing ones are downloaded."""
        refuse_while_writing()
        with self._cache.held(ref, self._download, is_checked=is_checked) as folder:
            yield folder

    def _download(self, key: str, file: BinaryIO) -> None:
        file.writelines(self._blocks(key))

    def _blocks(self, key: str) -> Iterator[bytes]:
        with self._asked():
            for block in obstore.get(self._store, key).stream(READ_BYTES):
                yield bytes(block)

    def path_of(self, prefix: str) -> Path:
        """The local folder that `fetched` yields for an object."""
        return self._cache.root / prefix

    def copy_out(self, path: str, target: Path) -> bool:
        """Download a file to `target`; returns whether it exists. Raises `OSError`, `BlobsAway`."""
        part = target.with_name(f"{STAGED}{target.name}")
        try:
            with part.open("wb") as file:
                self._download(path, file)
            part.replace(target)
        except FileNotFoundError:
            return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def digest_of(self, path: str) -> str:
        """SHA-256 of a stored file, which is downloaded completely for this and not kept."""
        digest = hashlib.sha256()
        for block in self._blocks(path):
            digest.update(block)
        return digest.hexdigest()

    # Listing and removing.

    def delete(self, prefix: str) -> None:
        """Remove an object from the bucket and its local copies. Raises `BlobsAway`."""
        self._cache.forget(prefix)
        paths = [found["path"] for found in self._listed(prefix)]
        if paths:
            with self._asked(), suppress(FileNotFoundError):
                obstore.delete(self._store, paths)

    def _listed(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        with self._asked():
            pages: Any = obstore.list(self._store, prefix, chunk_size=LIST_PAGE)  # pyright: ignore[reportUnknownMemberType]
            for page in pages:
                yield from page

    def names(self) -> set[str]:
        """The prefixes of all objects that have files, from a list of the whole bucket."""
        return {_name(found["path"]) for kind in KINDS for found in self._listed(kind)}

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether at least one of these objects has files."""
        wanted = set(names)
        found = (one["path"] for kind in KINDS for one in self._listed(kind))
        return any(_name(path) in wanted for path in found)

    def older_than(self, moment: datetime) -> set[str]:
        """The prefixes of objects whose files are all older, by the store's own clock."""
        newest: dict[str, datetime] = {}
        for kind in KINDS:
            for found in self._listed(kind):
                name, written = _name(found["path"]), found["last_modified"]
                newest[name] = max(written, newest.get(name, written))
        return {name for name, written in newest.items() if written < moment}

    def set_aside(self, names: Collection[str], now: datetime) -> str | None:
        """Move objects below `set-aside/<time>` in the bucket; returns the place. Raises `BlobsAway`."""
        if not names:
            return None
        folder = f"{SET_ASIDE}/{now:%Y-%m-%dT%H-%M-%SZ}"
        for name in sorted(names):
            for found in list(self._listed(name)):
                with self._asked(), suppress(FileNotFoundError):  # it was deleted meanwhile
                    obstore.copy(self._store, found["path"], f"{folder}/{found['path']}")
            self.delete(name)
        return f"{self.place.rstrip('/')}/{folder}"

    def sweep(self) -> None:
        """Remove the temporary files of a killed process."""
        self._cache.sweep()

    # Belonging to one installation.

    def check(self, identity: str | None, *, writes: bool = True) -> None:
        """Read the mark; with `writes`, also write and delete a small object. Raises `StoreRefused`."""
        probe = f".probe-{uuid4().hex}"
        try:
            self._refuse_others(identity)
            if not writes:
                return
            with self._asked():
                obstore.put(self._store, probe, b"tuneship")
                obstore.delete(self._store, probe)
        except (BlobsAway, FileNotFoundError) as fault:
            raise StoreRefused(
                f"the files cannot be kept in {self.place}: reading its mark, or writing and deleting a small object, "
                f"failed ({fault}): check the bucket, its permissions, and the variables with the credentials"
            ) from None

    def claim(self, identity: str, known: Collection[str]) -> None:
        """Write the mark if there is none, unless the bucket has foreign files. Raises `StoreRefused`."""
        try:
            if self._refuse_others(identity):
                return
            if strange := self.names() - set(known):
                raise StoreRefused(
                    f"{self.place} holds {count(len(strange), 'dataset or model', 'datasets or models')} that this "
                    f"installation does not know, and no {MARK}: name an empty bucket or prefix"
                )
            with self._asked(), suppress(AlreadyExistsError):
                # Of two installations that come at once, the store lets one write.
                obstore.put(self._store, MARK, identity.encode(), mode="create")
            self._refuse_others(identity)
        except BlobsAway as fault:
            raise StoreRefused(f"{self.place} does not answer: {fault}") from None

    def _refuse_others(self, identity: str | None) -> bool:
        """Whether the mark is there; raises `StoreRefused` if it names another installation."""
        try:
            owner = b"".join(self._blocks(MARK)).decode(errors="replace").strip()
        except FileNotFoundError:
            return False
        if owner != identity:
            raise StoreRefused(
                f"the files in {self.place} belong to the installation {owner}, and this is "
                f"{identity or 'a new one'}: name another bucket or prefix, or the right data directory and database"
            )
        return True

    @contextmanager
    def _asked(self) -> Generator[None]:
        """Turn obstore's errors into our own, whose texts contain no address. Raises `BlobsAway`."""
        try:
            yield
        except FileNotFoundError as error:
            # A bucket that is gone is no missing file: rows must not be ended for it.
            if "NoSuchBucket" not in str(error):
                raise FileNotFoundError("a stored file is missing") from None
            fault = "NoSuchBucket"
        except AlreadyExistsError:
            raise
        except BaseError as error:
            found = (pattern.search(str(error)) for pattern in FAILURES)
            fault = next((one[1] for one in found if one), type(error).__name__)
        else:
            return
        logger.warning("the object store failed: %s", fault)
        raise BlobsAway(fault) from None


def _name(path: str) -> str:
    """The prefix of the object that a key belongs to."""
    return "/".join(path.split("/")[:2])
