"""Small file systems in memory, for what happens when no byte is left. Only root may mount them."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Generator[Path]:
    """Mount a file system of this size (`256k`); the test is skipped where nothing can be mounted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(["/bin/mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(folder)], check=True)


def enlarge(folder: Path, size: str) -> None:
    """Give a file system of `small_disk` another size."""
    subprocess.run(["/bin/mount", "-o", f"remount,size={size}", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write one file into a folder until its disk has no room left."""
    with (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"x" * 4096)
            except OSError:
                return
