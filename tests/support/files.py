"""Read folders in which other processes work: files that vanish meanwhile are skipped without an error."""

import os
from pathlib import Path


def paths_below(folder: Path) -> list[Path]:
    """List folders and files; unlike `Path.rglob`, skip a folder that vanishes before it is read."""
    return [
        Path(path, name) for path, folders, files in os.walk(folder) for name in (*folders, *files)
    ]


def contents_below(folder: Path) -> dict[Path, bytes]:
    """Read every file that still exists."""
    found: dict[Path, bytes] = {}
    for path in paths_below(folder):
        try:
            found[path] = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue
    return found
