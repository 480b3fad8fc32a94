"""Checkpoints, and directories that exist whole or not at all whenever the process is killed.

A checkpoint holds tensors (safetensors) and a JSON state with their digest: no pickles. Knows
neither models nor what the values mean. Next: `training_loop.py`.
"""

import contextlib
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
from tuneship.host.file_digest import sha256_of
from tuneship.security.sealed_files import ObjectDamaged, read_plain, write_sealed
from tuneship.training.checkpoint_folders import KEPT, STEP, step_folder

TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a training after a step."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one job; one process at a time uses the directory."""

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        key: str | None = None,
        earlier_fingerprint: str | None = None,
    ) -> None:
        """Remove unfinished checkpoints. `key` seals the files.

        `fingerprint` identifies the run: checkpoints with another one are not resumed from, unless it is the one that
        an earlier version gave the run.
        """
        self._directory = directory
        self._fingerprint = fingerprint
        self._known = {fingerprint, earlier_fingerprint}
        self._key = key
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)

    def save(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the state after `step`; older checkpoints are removed once this one is on the disk."""

        def write_files(directory: Path) -> None:
            write_sealed(directory / TENSORS_FILE, self._key, save(dict(tensors)))
            summary = {
                "step": step,
                "fingerprint": self._fingerprint,
                "tensors_sha256": sha256_of(directory / TENSORS_FILE),
                "state": state,
            }
            write_sealed(directory / STATE_FILE, self._key, json.dumps(summary).encode())

        make_directory(step_folder(self._directory, step), write_files)
        for old in self._newest_first()[KEPT:]:
            shutil.rmtree(old)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is complete, undamaged and of this very run.

        Newer ones that can be read and are not so are removed: they would outlive those that this run will save.
        """
        for directory in self._newest_first():
            try:
                summary = json.loads(read_plain(directory / STATE_FILE, self._key))
                is_own = summary["fingerprint"] in self._known
                if is_own and summary["tensors_sha256"] == sha256_of(directory / TENSORS_FILE):
                    tensors = load(read_plain(directory / TENSORS_FILE, self._key))
                    return Checkpoint(summary["step"], summary["state"], tensors)
            except ObjectDamaged:
                pass
            except OSError:
                continue
            except (ValueError, KeyError, SafetensorError):
                pass  # damaged: losing some steps is better than failing the job
            shutil.rmtree(directory, ignore_errors=True)
        return None

    def _newest_first(self) -> list[Path]:
        return sorted(self._directory.glob(f"{STEP}*"), reverse=True)


def make_directory(final: Path, write_files: Callable[[Path], None]) -> None:
    """Make `final` with the files that `write_files` writes; a kill or a power cut leaves all of them or none.

    A directory of that name from an earlier attempt is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    write_files(unfinished)
    # The rename may reach the disk before the files, unless those are flushed first.
    for path in [*unfinished.rglob("*"), unfinished]:
        flush(path)
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    flush(final.parent)


def remove_leftovers(directory: Path) -> None:
    """Remove the unfinished directories of a process that was killed."""
    for path in directory.glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
