"""The result file of a job: its curve as CSV in Base64, as OpenAI sends it. Made from the rows when it is read."""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from tuneship.contract.jobs import JobStatus
from tuneship.contract.openai.files import FileObject
from tuneship.contract.openai.ids import result_file_of
from tuneship.service.context.context import Context
from tuneship.store import job_records
from tuneship.store.row_types import JobRow

HEAD = "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"


def csv_of(steps: Iterable[Mapping[str, Any]], measured: set[int]) -> str:
    """The file's lines; a number that was not measured at a step is empty there, as the training accuracy always is."""
    lines = [HEAD]
    for step in steps:
        is_measured = step["step"] in measured
        loss, accuracy = (
            step[name] if is_measured else "" for name in ("validation_loss", "accuracy")
        )
        lines.append(f"{step['step']},{step['training_loss']},,{loss},{accuracy}")
    return "\n".join(lines) + "\n"


def result_content(context: Context, job: JobRow) -> bytes:
    """The content of a job's result file."""
    with context.read() as connection:
        curve = job_records.curve_of(connection, job["id"], evaluated_only=False)
        measured = job_records.measured_steps(connection, job["id"])
    names = [str(column.name) for column in job_records.SHOWN]
    steps = [dict(zip(names, row, strict=True)) for row in curve.rows]
    return base64.b64encode(csv_of(steps, measured).encode())


def has_result_file(job: JobRow) -> bool:
    """Whether the job has completed, and so has a result file."""
    return job["status"] == JobStatus.COMPLETED


def result_file(context: Context, job: JobRow) -> FileObject:
    """The file as it is listed."""
    return FileObject(
        id=result_file_of(job["id"]),
        bytes=len(result_content(context, job)),
        created_at=int((job["completed_at"] or job["updated_at"]).timestamp()),
        filename="step_metrics.csv",
        purpose="fine-tune-results",
        status="processed",
    )
