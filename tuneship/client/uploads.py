"""Opens the file of an upload as JSON Lines, and reports how much of it has been sent."""

import json
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, Protocol, cast

from tuneship.client.records import is_json_lines, opened, records
from tuneship.contract.declaring.verbs import Columns, Source
from tuneship.contract.errors import SourceError

BLOCK = 1 << 20
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
        """Measure the file, which must be seekable, because a retry sends it again."""
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


@contextmanager
def upload_file(
    source: Source, columns: Columns | None
) -> Generator[tuple[BinaryIO, Callable[[], None]]]:
    """The file to send, and a call that fills it first, which may take as long as the source is big.

    JSON Lines are sent as they are. Anything else is written to a file without a name, as a retry must send the same
    bytes: it is gone with the process, however that ends.
    """
    with ExitStack() as stack:
        file: BinaryIO | None = None
        given: Any = source
        # With chosen columns, JSON Lines are rewritten like any other source.
        if columns is None and isinstance(given, str | os.PathLike):
            path = Path(cast("str", given))
            file = stack.enter_context(opened(path)) if is_json_lines(path) else None
        elif columns is None and hasattr(given, "read") and not hasattr(given, "encoding"):
            file = given
        if file is not None and file.seekable():
            yield file, lambda: None
            return
        try:
            spool = TemporaryFile()  # noqa: SIM115 - closing it may fail
        except OSError as error:
            raise _full(error) from None
        stack.callback(discard, spool)
        # What comes through a pipe cannot be read a second time.
        if file is not None:
            rows = iter(lambda: file.read(BLOCK), b"")
        else:
            rows = (
                json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
                for record in records(source, columns)
            )
        yield spool, partial(_fill, rows, spool)


def discard(spool: IO[bytes]) -> None:
    """Close an unnamed file. An error, such as a full disk, is ignored: it was reported before."""
    # A full disk fails once more here, and was reported before.
    with suppress(OSError):
        spool.close()


def _fill(lines: Iterable[bytes], spool: IO[bytes]) -> None:
    for line in lines:
        try:
            spool.write(line)
        except OSError as error:
            raise _full(error) from None
    try:
        spool.seek(0)
    except OSError as error:  # the last of it is written here
        raise _full(error) from None


def _full(error: OSError) -> SourceError:
    return SourceError(f"the rows cannot be copied to the temporary folder ({error.strerror})")
