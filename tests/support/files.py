"""Files of a folder in which other processes work: what goes while one looks is not there, and no error."""

import os
from pathlib import Path


def paths_below(folder: Path) -> list[Path]:
    """Folders and files; unlike `Path.rglob`, it goes on where a folder goes away before it is read."""
    return [
        Path(path, name) for path, folders, files in os.walk(folder) for name in (*folders, *files)
    ]


def contents_below(folder: Path) -> dict[Path, bytes]:
    """Of every file that was still there."""
    found: dict[Path, bytes] = {}
    for path in paths_below(folder):
        try:
            found[path] = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue
    return found
