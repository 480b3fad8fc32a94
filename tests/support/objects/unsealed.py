"""Run `tuneship serve` without one kind of encryption, to prove that the tests that search for plain text find it.

Usage: `python -m tests.support.objects.unsealed KIND tuneship.cli.main serve ...`, where KIND is one of `REMOVALS`. The
rest of the service is unchanged.
"""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from tuneship.service.jobs import local_launcher
from tuneship.store.files import blobs
from tuneship.training.spec import DataKeys, Order


class PlainWriter:
    """A replacement of `SealingWriter` that writes plain text."""

    def __init__(self, file: BinaryIO, *_: str) -> None:
        self._file = file
        self.write = file.write

    def close(self) -> None:
        self._file.close()


def unseal_datasets() -> None:
    def plain(path: Path, *_: Any) -> BinaryIO:
        return path.open("rb")

    blobs.SealingWriter = PlainWriter  # type: ignore[assignment, misc]
    blobs.open_plain = plain


def without_key(name: str) -> Callable[[], None]:
    """Make training processes write this kind of file in plain text, by leaving out its key."""

    def order(folder: Path, keys: DataKeys) -> Order:
        return Order(folder, replace(keys, **{name: None}))

    def remove() -> None:
        local_launcher.Order = order  # type: ignore[assignment, misc]

    return remove


REMOVALS: dict[str, Callable[[], None]] = {
    "datasets": unseal_datasets,
    "checkpoints": without_key("checkpoints"),
    "adapters": without_key("adapter"),
}

if __name__ == "__main__":
    kind, module = sys.argv[1:3]
    REMOVALS[kind]()
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
