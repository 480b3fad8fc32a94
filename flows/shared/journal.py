"""An append-only file of lines, and a lock that dies with its process: the storage of every record of the pipeline.

A line counts once its line break is on the disk. Half a line, left by a crash or a full disk, was never acted on and
is cut off by the next append. Lines may be linked, each to the one before it. The meaning of a line is defined in
`flows/rollout/record_file.py` and `flows/release/record_file.py`.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

from flows.shared.private_files import make_private, private
from tuneship.host.durable import flush, flush_open

Fact = TypeVar("Fact")
# Called with the path of a journal, its length in bytes, and the lines that were added.
Written = Callable[[Path, int, Sequence[str]], None]
_LOST = "it has lost lines since it was read"


class NotWritten(OSError):
    """The disk did not take a line; `filename` and `strerror` say which file and why."""


class Journal:
    """One append-only file. `lines`: its content when it was read."""

    def __init__(
        self,
        path: Path,
        link: Callable[[str, str], str] | None = None,
        written: Written | None = None,
    ) -> None:
        """Read the file; one that does not exist has no lines. Raises OSError for one that cannot be read.

        `link`: makes the line to be written from the last one of the file (empty: none) and a new one. `written`: hears
        of lines that are on the disk.
        """
        self.path = path
        self._link = link
        self._written = written
        content = b""
        with suppress(FileNotFoundError):
            content = path.read_bytes()
        # A half line is cut off by the next append, not here: its writer may be another process, and alive.
        self._length = content.rfind(b"\n") + 1
        self.lines = content[: self._length].split(b"\n")[:-1]
        self._last = self.lines[-1] if self.lines else b""
        self._waiting: list[str] = []
        self._fault: NotWritten | None = None

    def read(self, reader: Callable[[bytes], Fact | None]) -> tuple[list[Fact], list[int]]:
        """Parse each line. Returns the facts, and the numbers (from 1) of the lines that `reader` could not parse."""
        facts: list[Fact] = []
        damaged: list[int] = []
        for number, line in enumerate(self.lines, start=1):
            fact = reader(line)
            if fact is None:
                damaged.append(number)
            else:
                facts.append(fact)
        return facts, damaged

    def append(self, *lines: str) -> None:
        """Add lines, and return when they are on the disk. Raises `NotWritten`, and leaves the file as it was
        before.
        """
        added = [*self._waiting, *lines]
        try:
            self._write(added)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise NotWritten(error.errno, why, str(self.path)) from error
        self._waiting = []
        self._fault = None
        if self._written is not None:
            self._written(self.path, self._length, added)

    def append_if_possible(self, *lines: str) -> None:
        """Add lines if the disk takes them; otherwise the next append writes them first."""
        try:
            self.append(*lines)
        except NotWritten as error:
            self._waiting += lines
            self._fault = error

    @property
    def unwritten(self) -> str:
        """A note for people if lines are missing on the disk, and why; else empty."""
        if self._fault is None:
            return ""
        return f"the record {self.path} could not be written ({self._fault.strerror})"

    def _write(self, lines: Sequence[str]) -> None:
        is_new = not self.path.exists()
        # The file was moved away since it was read: a new one would hold the end of the record without its beginning.
        if is_new and self._length:
            raise OSError(errno.ESTALE, _LOST)
        # Every new folder is on the disk before the file is, or a power cut could lose the first line.
        missing = [folder for folder in self.path.parents if not folder.exists()]
        make_private(self.path.parent)
        for folder in missing:
            flush(folder.parent)
        with open(self.path, "a+b", buffering=0, opener=private) as file:
            if file.seek(0, os.SEEK_END) < self._length:
                raise OSError(errno.ESTALE, _LOST)
            # Another process may have added lines since this one read the file; only half a line is cut off.
            file.seek(self._length)
            added = file.read()
            end = self._length + added.rfind(b"\n") + 1
            last = [self._last, *added.split(b"\n")[:-1]][-1].decode(errors="replace")
            text = b""
            for line in lines:
                last = self._link(last, line) if self._link else line
                text += f"{last}\n".encode()
            try:
                file.truncate(end)
                _write_through(file, text)
            except OSError:
                # Some of several lines may be whole by now, and the caller hears that none of them was written.
                with suppress(OSError):
                    file.truncate(end)
                raise
        if is_new:
            flush(self.path.parent)
        self._length = end + len(text)
        self._last = text.split(b"\n")[-2]


def _write_through(file: FileIO, text: bytes) -> None:
    """Write everything at once, so that no other process reads a part of it, and sync. Raises OSError for a full
    disk.
    """
    if file.write(text) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    flush_open(file)


def damage_of(path: Path, numbers: Sequence[int]) -> str:
    """Name the lines that cannot be read, for people; never their text."""
    named = ", ".join(str(number) for number in numbers)
    return f"the record {path} cannot be read in line {named}"


class FileLock:
    """A lock for one process at a time, released by any end of that process."""

    def __init__(self, path: Path) -> None:
        """Name the lock's file, which `take` creates."""
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock; False if another process holds it. True if the lock's file cannot be created.

        Raises OSError for a lock that exists and cannot be opened.
        """
        try:
            make_private(self._path.parent)
            descriptor = private(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError:
            # The disk takes no new file: an existing lock can be taken through a descriptor for reading.
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
