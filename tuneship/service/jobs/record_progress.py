"""Turns the progress lines of a training into rows: metrics, log entries, the job's record, events.

Everything happens in the transaction of the caller, who holds the job's lease. Next: `training_keeper.py`.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.common import count
from tuneship.contract.jobs import JobStatus
from tuneship.service.jobs.attempts import ENDS, Attempt
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import JobRow
from tuneship.store.records import job_leases, job_records
from tuneship.store.records.outbox import emit

STEP_FIELDS = (
    "step",
    "training_loss",
    "validation_loss",
    "learning_rate",
    "epoch",
    "accuracy",
    "perplexity",
    "evaluated",
)
# Fields of a job that each of its events carries, as far as they are known.
SUMMARY = (
    "status",
    "current_epoch",
    "current_step",
    "total_steps",
    "training_loss",
    "validation_loss",
)
# Lines that are written to the job as they are.
WRITTEN = {"devices": ("devices",), "pace": ("tokens_per_second", "seconds_per_step")}
# Limit of the forecast, so that it stays a date that can be written.
FARTHEST_S = 10 * 365 * 86_400.0

Line = dict[str, Any]


def forecast_end(job: JobRow, now: datetime) -> datetime | None:
    """The expected end of a running job, if its next steps take as long as those of this attempt.

    None before the attempt's first step.
    """
    if job["status"] != JobStatus.RUNNING or job["seconds_per_step"] is None:
        return None
    left_s = (job["total_steps"] - job["current_step"]) * job["seconds_per_step"]
    return max(now, job["updated_at"] + timedelta(seconds=min(left_s, FARTHEST_S)))


def emit_event(
    connection: sa.Connection, job_id: str, event: str, now: datetime, **more: Any
) -> None:
    """Emit `fine_tuning.job.<event>` with the job's summary as the transaction leaves it."""
    job = rows.fetch(connection, tables.jobs, job_id, client_id=None)
    if job is None:
        raise RuntimeError("a job that changes has no row")
    known = {name: job[name] for name in SUMMARY if job[name] is not None}
    emit(connection, f"fine_tuning.job.{event}", dict(job), now, **{**known, **more})


def store_lines(
    connection: sa.Connection, attempt: Attempt, lines: Sequence[Line], now: datetime
) -> None:
    """Store lines in their order, so that a stream shows steps and log entries as they came.

    Raises `LeaseLost`, and `KeyError`, `TypeError` or `ValueError` for an object that is no progress line.
    """
    steps: list[Line] = []
    for line in lines:
        if line["kind"] == "step":
            steps.append(line)  # many steps are stored at once
            continue
        _store_steps(connection, attempt, steps, now)
        steps = []
        _store_line(connection, attempt, line, now)
    _store_steps(connection, attempt, steps, now)


def _store_steps(
    connection: sa.Connection, attempt: Attempt, steps: Sequence[Line], now: datetime
) -> None:
    if not steps:
        return
    metrics = [{name: step[name] for name in STEP_FIELDS} for step in steps]
    job_records.put_metrics(connection, attempt.claim.job_id, metrics)
    last = steps[-1]
    attempt.last_step = last["step"]
    job_leases.write(
        connection,
        attempt.claim,
        updated_at=now,
        current_step=last["step"],
        current_epoch=last["current_epoch"],
        training_loss=last["training_loss"],
        validation_loss=last["validation_loss"],
    )


def _store_line(connection: sa.Connection, attempt: Attempt, line: Line, now: datetime) -> None:
    """Store a line that is no step. Lines of an unknown kind, of a newer training, are ignored."""
    claim, kind = attempt.claim, line["kind"]
    if kind == "started":
        resumed_from: int = line["resumed_from_step"] or 0
        attempt.first_step = resumed_from
        attempt.last_step = max(attempt.last_step, resumed_from)
        attempt.furthest_step = job_records.last_step_of(connection, claim.job_id)
        totals = {name: line[name] for name in ("total_steps", "total_epochs")}
        job_leases.write(connection, claim, updated_at=now, **totals)
        text = f"training {count(line['training_examples'], 'example')} in {count(line['total_steps'], 'step')}"
        if resumed_from:
            text += f", from step {resumed_from} on"
        job_records.add_log(connection, claim.job_id, now, "info", text)
    elif kind in WRITTEN:
        job_leases.write(connection, claim, **{name: line[name] for name in WRITTEN[kind]})
    elif kind == "epoch":
        text = f"epoch {line['epoch']}: validation loss {line['validation_loss']:.4f}"
        job_records.add_log(connection, claim.job_id, now, "info", text)
        # A resumed attempt may complete an epoch again; its event is sent once.
        if job_records.mark_epoch_reported(connection, claim.job_id, line["epoch"]):
            losses = {name: line[name] for name in ("epoch", "training_loss", "validation_loss")}
            emit_event(connection, claim.job_id, "epoch_completed", now, **losses)
    elif kind == "row_losses":
        job_records.put_row_losses(connection, claim.job_id, line["losses"])
    elif kind == "log":
        job_records.add_log(connection, claim.job_id, now, line["level"], line["message"])
    elif kind == "ended_early":
        # The job has no more steps than these; some of its epochs are missing.
        job_leases.write(connection, claim, updated_at=now, total_steps=line["step"])
        text = (
            f"early_stopping_patience: ends after step {line['step']}; the validation loss has not been lower "
            f"than after step {line['best_step']} in {line['patience']} measurements"
        )
        job_records.add_log_once(connection, claim.job_id, now, "info", text)
    elif kind in ENDS:
        attempt.end = line
