"""A file that says how far its upload is."""

import os
from collections.abc import Callable
from typing import BinaryIO, Protocol

# Told the bytes that were read so far and the bytes in all; a repeated try starts at the front
# again.
Progress = Callable[[int, int], None]


class Readable(Protocol):
    """What httpx reads of an upload, block by block: memory stays the same for any size."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class WatchedFile:
    """Reads another file and tells `progress` after each block."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        """Measure the file; it must be seekable, as a retry must be."""
        self._file = file
        self._progress = progress
        place = file.tell()
        self._size = file.seek(0, os.SEEK_END)
        file.seek(place)

    def read(self, size: int = -1, /) -> bytes:
        """A block of the file."""
        block = self._file.read(size)
        if block:
            self._progress(self._file.tell(), self._size)
        return block

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As of the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As of the file."""
        return self._file.tell()
