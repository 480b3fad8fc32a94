"""Long answers that are sent while they are read: an archive of a folder, or a stored file."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

BLOCK_BYTES = 1 << 20


class Download(ABC):
    """Bytes of a known length. `service/http/downloads.py` sends them."""

    media: ClassVar[str]
    file_name: str
    # Bytes in all.
    length: int

    @abstractmethod
    def blocks(self) -> Iterator[bytes]:
        """The bytes in order, never none at a time. Raises `OSError`."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""


class FileDownload(Download):
    """An open file, which may be deleted while it is sent."""

    media = "application/octet-stream"

    def __init__(self, file: BinaryIO, file_name: str, length: int) -> None:
        """Take over the file; `length` is that of its plain bytes."""
        self._file = file
        self.file_name = file_name
        self.length = length

    def blocks(self) -> Iterator[bytes]:
        """The bytes of the file. Raises `OSError`."""
        while block := self._file.read(BLOCK_BYTES):
            yield block

    def close(self) -> None:
        """Close the file."""
        self._file.close()
