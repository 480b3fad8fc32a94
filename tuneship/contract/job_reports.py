"""Reports of a job on the wire: its metrics by step, its log, and the stream of both."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tuneship.contract.common import LogCursor, Reply, Timestamp, TimestampMs, absent


class JobMetrics(Reply):
    """Arrays of equal length, one entry a step. A step without evaluation repeats the last validation values."""

    job_id: str
    steps: list[int]
    training_loss: list[float | None]
    validation_loss: list[float | None]
    learning_rate: list[float | None]
    epochs: list[float | None]
    accuracy: list[float | None]
    perplexity: list[float | None]
    created_at: Timestamp
    thinned: Annotated[
        Literal[True] | None,
        Field(
            exclude_if=absent,
            description="Additive. The job has more than 5,000 steps, and some are left out: kept are the first and "
            "the last 250, every step at which the model was measured (of more than 2,500 the best and every nth), "
            "and every nth between.",
        ),
    ] = None

    def frame(self) -> Any:
        """A pandas frame: one row a step, one float column for each array; null is NaN."""
        from tuneship.contract.frames import JOB_COLUMNS, job_frame  # noqa: PLC0415 - loads pandas

        return job_frame(self.steps, {name: getattr(self, name) for name in JOB_COLUMNS})


class JobLogEntry(Reply):
    """One line of a job's log. It never holds text of a dataset."""

    timestamp: TimestampMs
    level: str
    message: str


class JobStep(Reply):
    """One step in the stream of a job: the data of an `event: metrics` frame."""

    step: int
    training_loss: float
    validation_loss: float
    learning_rate: float
    # Epochs that are done, as a fraction.
    epoch: float


class JobLogs(Reply):
    """One page of a job's log, oldest first."""

    logs: list[JobLogEntry]
    pagination: LogCursor
