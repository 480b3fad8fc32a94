"""Reports of a job on the wire: its metrics by step, its log, and the stream of both."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tuneship.contract.common import LogCursor, Reply, Timestamp, TimestampMs, absent


class RowLosses(Reply):
    """Arrays of equal length, one entry a validation row: mean losses in nats per learnt token, and no text.

    A third of the rows, drawn by the job's `comparison.seed`, chose the checkpoint; the others (`judge`) were not
    measured before.
    """

    rows: Annotated[
        list[int],
        Field(
            description="Numbers of the rows, from 1 on, in the order of the validation examples. Of more than 4,000 "
            "these are drawn."
        ),
    ]
    judge: Annotated[list[bool], Field(description="Whether the row had no part in a choice.")]
    trained_on: Annotated[
        list[bool], Field(description="Whether the same tokens are in the training data, too.")
    ]
    start: Annotated[list[float | None], Field(description="Before training: the base model's.")]
    served: Annotated[list[float | None], Field(description="Of the checkpoint that is the model.")]
    compared: Annotated[
        list[float | None] | None,
        Field(description="Of the model in `comparison`; null: none is named, or it is gone."),
    ] = None
    compared_model: Annotated[str | None, Field(description="The id of that model.")] = None


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
            "and every nth between. The stream of the log has every step.",
        ),
    ] = None
    row_losses: Annotated[
        RowLosses | None,
        Field(
            exclude_if=absent,
            description="Additive. Of a completed job with a `comparison` and at least 16 validation rows.",
        ),
    ] = None

    def frame(self) -> Any:
        """A pandas frame: one row a step, one float column for each array; null is NaN."""
        from tuneship.contract.declaring.frames import JOB_COLUMNS, job_frame  # noqa: PLC0415 - loads pandas

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
