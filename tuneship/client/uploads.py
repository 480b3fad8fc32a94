"""A file that reports how much of it has been uploaded."""

import os
from collections.abc import Callable
from typing import BinaryIO, Protocol

# Called with the bytes read so far and the bytes in all; a retry starts at the front again.
Progress = Callable[[int, int], None]


class Readable(Protocol):
    """The part of a file that httpx uses. It reads block by block, so memory stays the same for any size."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class WatchedFile:
    """Reads another file and calls `progress` after each block."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        """Measure the file; it must be seekable, as a retry must be."""
        self._file = file
        self._progress = progress
        place = file.tell()
        self._size = file.seek(0, os.SEEK_END)
        file.seek(place)

    def read(self, size: int = -1, /) -> bytes:
        """Read a block of the file."""
        block = self._file.read(size)
        # The empty block at the end would report the whole file a second time.
        if block:
            self._progress(self._file.tell(), self._size)
        return block

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Seek in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Position in the file, in bytes."""
        return self._file.tell()
