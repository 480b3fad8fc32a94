"""The result file of a job: its curve as CSV in Base64, as OpenAI sends it. Made from the rows when it is read."""

import base64
from collections.abc import Iterable

from tuneship.contract.jobs import JobStatus
from tuneship.contract.openai.files import FileObject
from tuneship.contract.openai.ids import result_file_of
from tuneship.service.context.context import Context
from tuneship.store.database.tables import JobRow, job_metrics
from tuneship.store.records import job_records

HEAD = "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
# Each number has the same length, so that the length of the file is known without making it.
NUMBER_BYTES = len("1.000000e+00")
# A smaller number would have a longer exponent.
SMALLEST = 1e-99
COMMAS_AND_END = 5
STEPS = job_metrics.c
COLUMNS = (
    STEPS.step,
    STEPS.training_loss,
    STEPS.validation_loss,
    STEPS.accuracy,
    STEPS.evaluated,
)


def _number(value: float) -> str:
    return f"{value if abs(value) >= SMALLEST else 0.0:{NUMBER_BYTES}.6e}"


def csv_of(steps: Iterable[tuple[int, float, float, float, bool]]) -> str:
    """The file's lines; a number that was not measured at a step is empty there, as the training accuracy always is."""
    lines = [HEAD]
    for step, training_loss, validation_loss, accuracy, evaluated in steps:
        measured = (_number(one) if evaluated else "" for one in (validation_loss, accuracy))
        lines.append(",".join((str(step), _number(training_loss), "", *measured)))
    return "\n".join(lines) + "\n"


def result_content(context: Context, job: JobRow) -> bytes:
    """The content of a job's result file."""
    with context.read() as connection:
        curve = job_records.curve_of(connection, job["id"], evaluated_only=False, columns=COLUMNS)
    return base64.b64encode(csv_of((*row,) for row in curve.rows).encode())


def _length(context: Context, job: JobRow) -> int:
    """The length of that content, which is not made for it."""
    with context.read() as connection:
        curve = job_records.curve_size(connection, job["id"])
    numbers = curve.steps + 2 * curve.evaluated
    plain = len(HEAD) + 1 + curve.digits + COMMAS_AND_END * curve.steps + NUMBER_BYTES * numbers
    return -(-plain // 3) * 4


def has_result_file(job: JobRow) -> bool:
    """Whether the job has completed, and so has a result file."""
    return job["status"] == JobStatus.COMPLETED


def result_file(context: Context, job: JobRow) -> FileObject:
    """The file as it is listed."""
    return FileObject(
        id=result_file_of(job["id"]),
        bytes=_length(context, job),
        created_at=int((job["completed_at"] or job["updated_at"]).timestamp()),
        filename="step_metrics.csv",
        purpose="fine-tune-results",
        status="processed",
    )
