"""What survives a kill: directories that exist whole or not at all.

A checkpoint holds tensors (safetensors) and a JSON state with their digest: no pickles. It knows
neither models nor what the values mean. Next: `tuneship/training/run.py`.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tuneship.host.durable import flush
from tuneship.security.sealed_files import read_plain, write_sealed

TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
# The latest, and the one before it in case the disk damages the latest.
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The whole state after a step."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one job; one process at a time uses the directory."""

    def __init__(self, directory: Path, fingerprint: str, key: str | None = None) -> None:
        """`fingerprint`: of all that makes the run; others' checkpoints are not resumed. `key`: seals the files."""
        self._directory = directory
        self._fingerprint = fingerprint
        self._key = key
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)

    def save(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep the state after `step`; older checkpoints go once this one is on the disk."""

        def fill(directory: Path) -> None:
            write_sealed(directory / TENSORS_FILE, self._key, save(dict(tensors)))
            mark = {
                "step": step,
                "fingerprint": self._fingerprint,
                "tensors_sha256": _sha256(directory / TENSORS_FILE),
                "state": state,
            }
            write_sealed(directory / STATE_FILE, self._key, json.dumps(mark).encode())

        make_directory(self._directory / f"step-{step:09}", fill)
        for old in self._newest_first()[KEPT:]:
            shutil.rmtree(old)

    def latest(self) -> Checkpoint | None:
        """The newest one that is complete, undamaged and of this very run."""
        found = (self._read(directory) for directory in self._newest_first())
        return next((checkpoint for checkpoint in found if checkpoint), None)

    def _newest_first(self) -> list[Path]:
        return sorted(self._directory.glob("step-*"), reverse=True)

    def _read(self, directory: Path) -> Checkpoint | None:
        try:
            mark = json.loads(read_plain(directory / STATE_FILE, self._key))
            if mark["fingerprint"] != self._fingerprint:
                return None
            if mark["tensors_sha256"] != _sha256(directory / TENSORS_FILE):
                return None
            tensors = load(read_plain(directory / TENSORS_FILE, self._key))
            return Checkpoint(mark["step"], mark["state"], tensors)
        except (OSError, ValueError, KeyError, SafetensorError):
            return None


def make_directory(final: Path, fill: Callable[[Path], None]) -> None:
    """Make `final` with what `fill` writes, so that a kill or a power cut leaves all of it or nothing.

    A directory of that name from an earlier attempt is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    fill(unfinished)
    for path in [*unfinished.rglob("*"), unfinished]:
        flush(path)
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    flush(final.parent)


def remove_leftovers(directory: Path) -> None:
    """Unfinished directories of a process that was killed."""
    for path in directory.glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
