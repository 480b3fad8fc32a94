"""A folder as a tar archive that is made while it is sent, without a copy on the disk."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tuneship.service.answers.downloads import BLOCK_BYTES, Download


class TarStream(Download):
    """The files of a folder, opened: they may be deleted while they are sent."""

    media = "application/x-tar"

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: of the archive without its extension, and of the folder in it. Raises `OSError`."""
        self.file_name = f"{name}.tar"
        self._files: list[tuple[bytes, int, BinaryIO]] = []
        for path in sorted(folder.iterdir()):
            entry = tarfile.TarInfo(f"{name}/{path.name}")
            entry.size, entry.mode = path.stat().st_size, 0o644
            self._files.append((entry.tobuf(tarfile.GNU_FORMAT), entry.size, path.open("rb")))
        content = sum(len(head) + size + -size % tarfile.BLOCKSIZE for head, size, _ in self._files)
        self.length = content + 2 * tarfile.BLOCKSIZE

    def blocks(self) -> Iterator[bytes]:
        """The bytes of the archive in order, never none at a time. Raises `OSError`."""
        for head, size, file in self._files:
            yield head
            while block := file.read(BLOCK_BYTES):
                yield block
            if padding := -size % tarfile.BLOCKSIZE:
                yield bytes(padding)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        """Close the files, which frees the disk space of deleted ones."""
        for _, _, file in self._files:
            file.close()
