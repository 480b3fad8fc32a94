"""Records and reports name deployments and models, so only their owner may read them."""

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Create a folder and those above it with mode 0700; folders that exist keep their mode. Raises OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def private(path: str | Path, flags: int) -> int:
    """Open a file, a new one with mode 0600: an `opener` of `open`. Raises OSError."""
    return os.open(path, flags, 0o600)
