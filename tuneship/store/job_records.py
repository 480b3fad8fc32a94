"""Rows beside a job: its metrics by step and its log."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.rows import Row
from tuneship.store.tables import job_logs, job_metrics


def add_log(
    connection: sa.Connection, job_id: str, now: datetime, level: str, message: str
) -> None:
    """Append to the job's log; never text of a dataset."""
    connection.execute(
        sa.insert(job_logs).values(job_id=job_id, timestamp=now, level=level, message=message)
    )


def logs_of(connection: sa.Connection, job_id: str, *, after: int, limit: int) -> Sequence[Row]:
    """Entries behind a position, oldest first."""
    query = (
        sa.select(job_logs)
        .where(job_logs.c.job_id == job_id, job_logs.c.id > after)
        .order_by(job_logs.c.id)
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def put_metrics(connection: sa.Connection, job_id: str, steps: Sequence[dict[str, Any]]) -> None:
    """Store steps by (job, step): what a resumed worker reports again overwrites, never doubles."""
    if not steps:
        return
    numbers = [step["step"] for step in steps]
    connection.execute(
        sa.delete(job_metrics).where(
            job_metrics.c.job_id == job_id, job_metrics.c.step.in_(numbers)
        )
    )
    connection.execute(sa.insert(job_metrics), [{"job_id": job_id, **step} for step in steps])


def metrics_of(connection: sa.Connection, job_id: str) -> Sequence[Row]:
    """All steps in rising order."""
    query = sa.select(job_metrics).where(job_metrics.c.job_id == job_id)
    return [dict(row) for row in connection.execute(query.order_by(job_metrics.c.step)).mappings()]
