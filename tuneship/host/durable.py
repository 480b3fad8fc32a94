"""What makes a file survive a power failure: service, training and pipeline do it in this one way.

The bytes are on the disk after `flush` or `flush_open`; a new name, or a file that was moved, only after the `flush` of
its folder, too.
"""

import os
from pathlib import Path
from typing import IO, Any


def flush(path: Path) -> None:
    """Let a file, or the names in a folder, survive a power failure. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_open(file: IO[Any]) -> None:
    """The same for a file that is still written to. Raises `OSError`."""
    file.flush()
    os.fsync(file.fileno())


def write_private(file: Path, text: str) -> None:
    """Write a file that its owner alone may read; what stood there stands until the new one is on the disk.

    Raises `OSError`.
    """
    temporary = file.with_name(f".tmp-{file.name}")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        flush_open(stream)
    temporary.replace(file)
    flush(file.parent)
