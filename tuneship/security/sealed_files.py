"""Encrypts files: data of a tenant, and everything derived from it, is never on a disk in plain text.

Files use Tink's streaming AEAD, whose segments of 1 MiB cannot be changed, exchanged, removed or cut off unnoticed.
Each object (a dataset, the checkpoints of a job, an adapter) has a data key of its own, so that no file can replace one
of another object, and the file's name is the associated data, so that no file can replace another of the same object.
A key of None stands for a plain file: one of a base model, or of a conversion. `tuneship/service/access/data_keys.py`
keeps the keys.
"""

import io
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import tink
from tink import secret_key_access, streaming_aead

# One segment: the most that is sealed or opened at once.
BLOCK_BYTES = 1 << 20

streaming_aead.register()


class ObjectDamaged(OSError):
    """A sealed file was changed, cut off or exchanged, or the key does not belong to it.

    It is an `OSError`, since code that handles unreadable files must handle damaged ones too.
    """

    def __init__(self) -> None:
        super().__init__("an encrypted file is damaged, or its key is another one")


def new_key() -> str:
    """Generate a data key, as text of about 240 characters."""
    template = streaming_aead.streaming_aead_key_templates.AES256_GCM_HKDF_1MB
    handle = tink.new_keyset_handle(template)
    return tink.proto_keyset_format.serialize(handle, secret_key_access.TOKEN).hex()


# The files of an object share a key, and are opened one after the other: it is parsed once.
@lru_cache(maxsize=64)
def _primitive(key: str) -> Any:
    handle = tink.proto_keyset_format.parse(bytes.fromhex(key), secret_key_access.TOKEN)
    return handle.primitive(streaming_aead.StreamingAead)


class SealingWriter:
    """Encrypts the bytes written to it; the file is complete only after `close`."""

    def __init__(self, file: BinaryIO, key: str, name: str) -> None:
        """Write sealed bytes to `file`, which `close` closes too. `name`: the name that the file will have."""
        self._target = _Target(file)
        self._stream: BinaryIO = _primitive(key).new_encrypting_stream(self._target, name.encode())

    def write(self, block: "bytes | bytearray | memoryview") -> None:
        """Append plain bytes. Raises `OSError`, e.g. if the disk is full."""
        view = memoryview(block)
        # Tink would copy the whole rest of a longer block for each segment.
        for start in range(0, len(view), BLOCK_BYTES):
            self._attempt(lambda start=start: self._stream.write(view[start : start + BLOCK_BYTES]))

    def close(self) -> None:
        """Write the last segment, which marks the end of the file, and close it. Raises `OSError`."""
        self._attempt(self._stream.close)

    def _attempt(self, work: Any) -> None:
        # A full disk must not read as a damaged file.
        try:
            work()
        except tink.TinkError:
            raise self._target.fault or ObjectDamaged() from None


class _Target(io.RawIOBase):
    """Remembers why a write failed, since Tink's error does not say."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.fault: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, block: Any, /) -> int:
        try:
            return self._file.write(block)
        except OSError as fault:
            self.fault = fault
            raise

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            self._file.close()
        except OSError as fault:
            self.fault = fault
            raise


class _Opened(io.RawIOBase):
    """Reads the plain bytes of a sealed file from start to end."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            block = self._stream.read(len(buffer))
        except tink.TinkError:
            raise ObjectDamaged from None
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._stream.close()


def open_plain(path: Path, key: str | None, name: str = "") -> BinaryIO:
    """Open a file for reading its plain bytes from start to end; it is not seekable.

    `key`: None for a plain file. `name`: the name for which the file is sealed, if it still has another one.
    Raises `OSError`; reading raises `ObjectDamaged`.
    """
    file = path.open("rb")
    if key is None:
        return file
    stream = _primitive(key).new_decrypting_stream(file, (name or path.name).encode())
    return io.BufferedReader(_Opened(stream), BLOCK_BYTES)


def read_plain(path: Path, key: str | None) -> bytes:
    """Read the plain bytes of a whole file. Raises `OSError`, `ObjectDamaged`."""
    with open_plain(path, key) as file:
        return b"".join(iter(lambda: file.read(BLOCK_BYTES), b""))


def seal_file(source: Path, path: Path, key: str) -> None:
    """Write a sealed copy of a plain file, a block at a time. Raises `OSError`."""
    # Whoever made the file may have put a link to another one in its place.
    with os.fdopen(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        writer = SealingWriter(path.open("wb", buffering=0), key, path.name)
        try:
            while block := file.read(BLOCK_BYTES):
                writer.write(block)
        finally:
            writer.close()


def write_sealed(path: Path, key: str | None, content: bytes) -> None:
    """Write a whole file, sealed if there is a key. Raises `OSError`."""
    if key is None:
        path.write_bytes(content)
        return
    writer = SealingWriter(path.open("wb", buffering=0), key, path.name)
    try:
        writer.write(content)
    finally:
        writer.close()
