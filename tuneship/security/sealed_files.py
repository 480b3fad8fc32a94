"""Files that only a key opens: what a tenant gave, and what became of it, never lies on a disk in plain text.

Tink's streaming AEAD: segments of 1 MiB that cannot be changed, exchanged, left out or cut off unnoticed. Each object
(a dataset, the checkpoints of a job, an adapter) has a key of its own, so that no file passes for one of another
object; the file's name is the associated data, so that none passes for another of the same object. A key of None is a
file that an earlier version wrote in plain. Who keeps the keys: `tuneship/service/access/data_keys.py`. Knows no
database.
"""

import io
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import tink
from tink import secret_key_access, streaming_aead

# Bytes that are sealed or opened at once: a segment.
BLOCK = 1 << 20

streaming_aead.register()


class ObjectDamaged(OSError):
    """A sealed file was changed, cut off, exchanged, or its key is another one."""

    def __init__(self) -> None:
        """An OSError: who expects that a file cannot be read expects this."""
        super().__init__("a sealed file is damaged, or its key is another one")


def new_key() -> str:
    """A data key, as text of about 240 characters."""
    template = streaming_aead.streaming_aead_key_templates.AES256_GCM_HKDF_1MB
    handle = tink.new_keyset_handle(template)
    return tink.proto_keyset_format.serialize(handle, secret_key_access.TOKEN).hex()


@lru_cache(maxsize=64)
def _primitive(key: str) -> Any:
    handle = tink.proto_keyset_format.parse(bytes.fromhex(key), secret_key_access.TOKEN)
    return handle.primitive(streaming_aead.StreamingAead)


class SealingWriter:
    """Seals what is written to it; the file is whole once it is closed."""

    def __init__(self, file: BinaryIO, key: str, name: str) -> None:
        """`file`: takes the sealed bytes and is closed with this. `name`: that the file will have."""
        self._target = _Target(file)
        self._stream: BinaryIO = _primitive(key).new_encrypting_stream(self._target, name.encode())

    def write(self, block: "bytes | bytearray | memoryview") -> None:
        """Raises `OSError`, e.g. when the disk is full."""
        view = memoryview(block)
        for start in range(0, len(view), BLOCK):  # of what is longer, Tink makes a copy per segment
            self._attempt(lambda start=start: self._stream.write(view[start : start + BLOCK]))

    def close(self) -> None:
        """Write the last segment, which says that nothing follows. Raises `OSError`."""
        self._attempt(self._stream.close)

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except tink.TinkError:
            raise self._target.fault or ObjectDamaged() from None


class _Target(io.RawIOBase):
    """Remembers why the file could not be written: Tink only says that it failed."""

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
    """The plain text of a sealed file, from start to end."""

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
    """A file from its start; it cannot be sought. `name`: the one it is sealed with, where it still has another.

    Raises `OSError`, and `ObjectDamaged` while it is read.
    """
    file = path.open("rb")
    if key is None:
        return file
    stream = _primitive(key).new_decrypting_stream(file, (name or path.name).encode())
    return io.BufferedReader(_Opened(stream), BLOCK)


def read_plain(path: Path, key: str | None) -> bytes:
    """A whole file. Raises `OSError`, `ObjectDamaged`."""
    with open_plain(path, key) as file:
        return b"".join(iter(lambda: file.read(BLOCK), b""))


def write_sealed(path: Path, key: str | None, content: bytes) -> None:
    """A whole file; in plain without a key. Raises `OSError`."""
    if key is None:
        path.write_bytes(content)
        return
    writer = SealingWriter(path.open("wb", buffering=0), key, path.name)
    try:
        writer.write(content)
    finally:
        writer.close()
