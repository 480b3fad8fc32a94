"""Small files of the service's own, e.g. its secrets: whole or not at all, also when the power fails."""

import os
from pathlib import Path


def write_private(file: Path, text: str) -> None:
    """Write a file that its owner alone may read; what stood there stands until the new one is on the disk.

    Raises `OSError`.
    """
    temporary = file.with_name(f".tmp-{file.name}")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    flush(file.parent)


def flush(path: Path) -> None:
    """Let a file, or the names in a folder, survive a power failure. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
