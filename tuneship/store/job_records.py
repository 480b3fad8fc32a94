"""Rows beside a job: its metrics by step and its log."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import ALIVE
from tuneship.store.rows import Row
from tuneship.store.tables import job_logs, job_metrics, jobs


def is_dataset_needed(connection: sa.Connection, dataset_id: str) -> bool:
    """Whether a job that has not ended trains or validates on it. Those alive are found by their state: few."""
    uses_it = sa.or_(jobs.c.dataset_id == dataset_id, jobs.c.validation_dataset_id == dataset_id)
    query = sa.select(jobs.c.id).where(jobs.c.status.in_(ALIVE), uses_it).limit(1)
    return connection.execute(query).first() is not None


def add_log(
    connection: sa.Connection, job_id: str, now: datetime, level: str, message: str
) -> None:
    """Append to the job's log; never text of a dataset. One writer at a time: ids rise in the order of commits."""
    connection.execute(
        sa.insert(job_logs).values(job_id=job_id, timestamp=now, level=level, message=message)
    )


def add_log_once(
    connection: sa.Connection, job_id: str, now: datetime, level: str, message: str
) -> None:
    """The same, unless an earlier attempt has said it: a resumed one decides alike, and says so again."""
    query = sa.select(job_logs.c.id).where(
        job_logs.c.job_id == job_id, job_logs.c.message == message
    )
    if connection.execute(query.limit(1)).first() is None:
        add_log(connection, job_id, now, level, message)


def logs_of(connection: sa.Connection, job_id: str, *, after: int, limit: int) -> Sequence[Row]:
    """Entries behind a position, oldest first."""
    query = (
        sa.select(job_logs)
        .where(job_logs.c.job_id == job_id, job_logs.c.id > after)
        .order_by(job_logs.c.id)
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def is_first_told(connection: sa.Connection, job_id: str, epoch: int) -> bool:
    """Note that the end of an epoch is told; answers whether it was not before."""
    result = connection.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.epochs_told < epoch)
        .values(epochs_told=epoch)
    )
    return result.rowcount == 1


def put_metrics(connection: sa.Connection, job_id: str, steps: Sequence[dict[str, Any]]) -> None:
    """Store steps by (job, step): what a resumed worker reports again overwrites, never doubles.

    Each also keeps the id of the newest log entry, which is its place in the job's stream.
    """
    if not steps:
        return
    numbers = [step["step"] for step in steps]
    connection.execute(
        sa.delete(job_metrics).where(
            job_metrics.c.job_id == job_id, job_metrics.c.step.in_(numbers)
        )
    )
    newest = sa.select(sa.func.coalesce(sa.func.max(job_logs.c.id), 0))
    place = {
        "job_id": job_id,
        "log_id": connection.execute(newest.where(job_logs.c.job_id == job_id)).scalar_one(),
    }
    connection.execute(sa.insert(job_metrics), [{**step, **place} for step in steps])


def last_step_of(connection: sa.Connection, job_id: str) -> int:
    """The furthest step that any attempt has told of; 0 before the first."""
    query = sa.select(sa.func.coalesce(sa.func.max(job_metrics.c.step), 0))
    return connection.execute(query.where(job_metrics.c.job_id == job_id)).scalar_one()


def metrics_of(connection: sa.Connection, job_id: str, *, evaluated_only: bool) -> Sequence[Row]:
    """Steps in rising order: all, or those at which the model was measured."""
    query = sa.select(job_metrics).where(job_metrics.c.job_id == job_id)
    if evaluated_only:
        query = query.where(job_metrics.c.evaluated)
    return [dict(row) for row in connection.execute(query.order_by(job_metrics.c.step)).mappings()]


def steps_behind(
    connection: sa.Connection, job_id: str, *, step: int | None, log_id: int, limit: int
) -> Sequence[Row]:
    """Steps above `step`, or without one those stored when `log_id` or a later entry was the newest."""
    passed = job_metrics.c.log_id >= log_id if step is None else job_metrics.c.step > step
    query = (
        sa.select(job_metrics)
        .where(job_metrics.c.job_id == job_id, passed)
        .order_by(job_metrics.c.step)
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]
