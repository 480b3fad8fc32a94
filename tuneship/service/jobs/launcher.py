"""The protocol for launching trainings: the keeper decides about jobs without knowing processes, folders or nodes.

`local_launcher.py` is the implementation for processes of this machine, `agent_launcher.py` the one for processes on
other machines. A launcher may be asked about the same attempt again after the service was restarted, so nothing that it
knows may matter: rows and checkpoints suffice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from tuneship.store.database.rows import Row
from tuneship.training.spec import DataKeys


@dataclass(frozen=True)
class TrainingOrder:
    """An order for one attempt at a job, with checked files."""

    # The job's row as it was claimed, with the number of the attempt.
    job: Row
    # Directory of the base model.
    base: Path
    # Row of the dataset to train on.
    training: Row
    validation: Row | None
    # Data keys of all that the attempt reads and writes; a launcher keeps them out of files and arguments.
    keys: DataKeys = field(repr=False)
    # Row of the tuned model that is measured beside the job's own.
    compared: Row | None = None


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the store of files, as named by a job's row."""

    attempt: int
    step: int
    # SHA-256 of each file, by name.
    objects: Mapping[str, str]


@dataclass(frozen=True)
class TrainingNews:
    """Progress lines from an offset on, in their order."""

    lines: Sequence[dict[str, Any]]
    # The offset to continue from, once the lines are stored.
    offset: int
    # How the training ended, negative for a signal; None while it runs.
    #
    # It is read before the lines are: an exit code without lines means that none will come.
    exit_code: int | None = None
    # The attempt's newest checkpoint that is in the store of files as a whole.
    checkpoint: StoredCheckpoint | None = None


class TrainingProgress(Protocol):
    """The progress of one attempt."""

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        """Read complete lines from the offset on. Raises `ValueError` where the first one cannot be read."""
        ...


class Training(TrainingProgress, Protocol):
    """An attempt that was started."""

    @property
    def is_running(self) -> bool:
        """Whether its processes may still compute; then nobody else may claim its job."""
        ...

    async def cancel(self) -> None:
        """Ask it to stop after its current step."""
        ...

    async def kept_step(self) -> int:
        """The step of the latest checkpoint from which the next attempt can resume; 0 if there is none."""
        ...

    def keep_only(self, checkpoint: StoredCheckpoint) -> None:
        """Note that the job's row names a stored checkpoint, so that earlier ones may be deleted."""
        ...

    async def store_result(self, key: str) -> Mapping[str, str]:
        """Store the adapter's files under the key; return their SHA-256 by name. Call it after the line `completed`."""
        ...

    async def end(self) -> None:
        """End it and everything that it started, at once. May be called again.

        Where that is not certain yet, `news` has no exit code before it is.
        """
        ...


class TrainingLauncher(Protocol):
    """Starts trainings and ends them."""

    async def start(self, order: TrainingOrder) -> Training:
        """Start an attempt. Leaves nothing running when it raises, and starts nothing once it was cancelled."""
        ...

    def earlier(self, job_id: str, attempt: int) -> TrainingProgress:
        """The progress of an attempt that may have written lines which its service did not live to store."""
        ...

    def preload(self, now: datetime) -> None:
        """Prepare for the next start; called often while no training is starting."""
        ...

    async def clear(self, job_id: str) -> None:
        """Remove the working files and checkpoints of a job that has ended. Stored ones may stay for a day."""
        ...

    async def stop(self) -> None:
        """End all trainings with the service; their jobs resume from checkpoints after its next start."""
        ...
