"""Lines of files that people write, of which one may be as long as its file. Pure."""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def lines_up_to(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """The lines of a file with their ends; of a line that is too long, its beginning, which is longer, too."""
    # An end may have two bytes.
    while line := file.readline(most_bytes + 2):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 16)


def is_longer(line: bytes, most_bytes: int) -> bool:
    """Whether a line is too long, its end left out."""
    return len(line) > most_bytes and len(line.rstrip(b"\r\n")) > most_bytes


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The numbers, from 1, and the bytes of the lines that are not blank."""
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield number, text
