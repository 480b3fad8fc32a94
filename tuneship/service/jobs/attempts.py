"""One attempt at a job from the keeper's view: how much of its progress is stored, and how it ended."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tuneship.service.jobs.launcher import StoredCheckpoint, Training
from tuneship.store.database.rows import Row
from tuneship.store.records.job_leases import JobLease

# Each job has a key for its checkpoints and one for its adapter, from its creation on.
SEALED_KINDS = ("jobs", "models")
# Kinds of the progress lines after which no other comes.
ENDS = ("completed", "failed", "cancelled")


@dataclass
class Attempt:
    """The stored progress of one attempt."""

    # The right to store it, which may be a later attempt's.
    claim: JobLease
    number: int
    # Bytes of progress that are stored.
    offset: int = 0
    # The step from which this attempt began; None before its line `started`.
    first_step: int | None = None
    last_step: int = 0
    # Highest step reached by earlier attempts.
    furthest_step: int = 0
    # The line with which it ended.
    end: dict[str, Any] | None = None
    # Its newest checkpoint that the job's row names.
    checkpoint: StoredCheckpoint | None = None


@dataclass(kw_only=True)
class RunningAttempt(Attempt):
    """An attempt that this service has started."""

    job: Row
    training: Training
    # The training is ended at this time, whatever it does.
    latest_end: datetime
    cancelled_at: datetime | None = None

    def has_model(self) -> bool:
        """Whether its adapter is complete, which is so before the line `completed`, and nobody has cancelled.

        A cancelled attempt is waited for: its job is `cancelled` only when its processes are gone.
        """
        is_completed = self.end is not None and self.end["kind"] == "completed"
        return is_completed and self.cancelled_at is None

    def is_overdue(self, now: datetime, patience: timedelta) -> bool:
        """Whether it was asked to stop and has not stopped within the patience."""
        return self.cancelled_at is not None and now - self.cancelled_at > patience

    async def has_advanced(self) -> bool:
        """Whether it got further than earlier attempts, or has kept a checkpoint that they had not."""
        if self.first_step is None:
            return False
        return (
            self.last_step > self.furthest_step or await self.training.kept_step() > self.first_step
        )


def remaining_seconds(job: Row) -> float:
    """Seconds of the job's maximum runtime that earlier attempts have left; `job` is a row that was just claimed."""
    spent_s = (job["updated_at"] - job["started_at"]).total_seconds()
    return max(0.0, job["compute_config"]["max_runtime_hours"] * 3600.0 - spent_s)
