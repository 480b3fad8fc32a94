"""Folders for unfinished work: removed at the end, and by the next one where a process was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LOCK = "lock"


@contextmanager
def staged(folder: Path, prefix: str, sweep: Callable[[Path], None]) -> Generator[Path]:
    """A new folder in `folder`, removed at the end; `sweep` first removes the remains of killed processes."""
    with ExitStack() as held:
        with alone(folder):
            sweep(folder)
            stage = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            held.callback(shutil.rmtree, stage, ignore_errors=True)
            lock = held.enter_context((stage / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield stage


def abandoned(folder: Path, prefix: str) -> Iterator[Path]:
    """The folders with this prefix whose process has ended."""
    for leftover in folder.glob(f"{prefix}*"):
        try:
            with (leftover / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process works
        except OSError:
            pass  # its process was killed before it made the lock
        yield leftover


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the folders with this prefix whose process has ended."""
    for leftover in abandoned(folder, prefix):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Let no other process make or remove folders of unfinished work meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
