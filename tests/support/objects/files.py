"""Read folders in which other processes work: files that vanish meanwhile are skipped without an error."""

import io
import os
import tarfile
from collections.abc import Mapping
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


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """An archive of files by their names."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return whole.getvalue()
