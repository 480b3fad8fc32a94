"""Writes files that survive a power failure; service, training and pipeline all use these functions.

The bytes are on the disk after `flush` or `flush_open`. A new or renamed file also needs a `flush` of its folder.
"""

import os
from pathlib import Path
from typing import IO, Any

# The beginning of the names of files that are not whole yet.
TEMPORARY = ".tmp-"


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_open(file: IO[Any]) -> None:
    """Write an open file to the disk (fsync). Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def write_private(file: Path, content: str | bytes) -> None:
    """Replace a file by one that only its owner may read: whole, or not at all. Raises OSError."""
    temporary = file.with_name(f"{TEMPORARY}{file.name}")
    temporary.unlink(missing_ok=True)
    # Created with its mode, so that no other user can open it before it is private.
    temporary.touch(mode=0o600)
    try:
        with temporary.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            flush_open(stream)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(file.parent)
