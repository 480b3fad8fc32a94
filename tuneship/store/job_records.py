"""Rows beside a job: its metrics by step and its log."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import ALIVE
from tuneship.store.queries import Row
from tuneship.store.tables import job_logs, job_metrics, jobs

SHOWN = (
    job_metrics.c.step,
    job_metrics.c.epoch,
    job_metrics.c.training_loss,
    job_metrics.c.validation_loss,
    job_metrics.c.learning_rate,
    job_metrics.c.accuracy,
    job_metrics.c.perplexity,
)
# So many steps are read at once: a picture shows no more, and the answer is made in some 20 ms.
MOST_STEPS = 5_000
# Half of it at the beginning, half at the end: whether a running job diverges is decided by its
# last steps.
UNBROKEN = 500
AT_ONCE = 500


def is_dataset_needed(connection: sa.Connection, dataset_id: str) -> bool:
    """Whether a job that has not ended trains or validates on it. Those alive are found by their state: few."""
    uses_it = sa.or_(jobs.c.dataset_id == dataset_id, jobs.c.validation_dataset_id == dataset_id)
    query = sa.select(jobs.c.id).where(jobs.c.status.in_(ALIVE), uses_it).limit(1)
    return connection.execute(query).first() is not None


def security_settings_of(
    connection: sa.Connection, client_id: str, model_names: Iterable[str]
) -> Sequence[Row]:
    """The `security_settings` of the jobs that tuned these models; base models have no job.

    The id of a tuned model ends in that of its job, so this also holds for a model that is gone.
    """
    ids = {f"ft_{name.rpartition(':')[2]}" for name in model_names if name.startswith("ft:")}
    if not ids:
        return []
    query = sa.select(jobs.c.security_settings).where(
        jobs.c.client_id == client_id, jobs.c.id.in_(ids)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


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


def mark_epoch_reported(connection: sa.Connection, job_id: str, epoch: int) -> bool:
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


@dataclass(frozen=True)
class StepRows:
    """Steps of a job in rising order; each row has the columns of `SHOWN`."""

    rows: Sequence[sa.Row[Any]]
    is_thinned: bool
    """Some stored steps were left out: there are more than may be read at once."""


def curve_of(
    connection: sa.Connection, job_id: str, *, evaluated_only: bool, most: int = MOST_STEPS
) -> StepRows:
    """All steps, or those at which the model was measured; about `most` where there are more.

    A thinned curve keeps every measured step (the best and every nth where they alone are too many), its beginning and
    its end without a gap, and every nth step between. Only what is kept is read into memory.
    """
    own = job_metrics.c.job_id == job_id
    # Two queries: each takes one look at the index, both in one would read it from end to end.
    first, last = (
        connection.scalar(sa.select(end(job_metrics.c.step)).where(own)) or 0
        for end in (sa.func.min, sa.func.max)
    )
    if last - first < most:
        every = sa.select(*SHOWN).where(own).order_by(job_metrics.c.step)
        query = every.where(job_metrics.c.evaluated) if evaluated_only else every
        return StepRows(connection.execute(query).all(), is_thinned=False)
    chosen, is_thinned = _measured_steps(connection, job_id, most // 2)
    if not evaluated_only:
        nth = -(-(last - first) // (most // 2 - UNBROKEN))
        is_thinned = True
        chosen |= {*range(first, last, nth), *range(first, first + UNBROKEN // 2)}
        chosen |= set(range(last - UNBROKEN // 2 + 1, last + 1))
    steps, found = sorted(chosen), list[sa.Row[Any]]()
    for place in range(0, len(steps), AT_ONCE):
        wanted = job_metrics.c.step.in_(steps[place : place + AT_ONCE])
        query = sa.select(*SHOWN).where(own, wanted).order_by(job_metrics.c.step)
        found += connection.execute(query).all()
    return StepRows(found, is_thinned)


def _measured_steps(connection: sa.Connection, job_id: str, most: int) -> tuple[set[int], bool]:
    """Steps at which the model was measured, and whether some were left out."""
    own = sa.and_(job_metrics.c.job_id == job_id, job_metrics.c.evaluated)
    step = job_metrics.c.step
    few = list(connection.scalars(sa.select(step).where(own).order_by(step).limit(most + 1)))
    if len(few) <= most:
        return set(few), False
    first, last = (
        connection.scalar(sa.select(end(step)).where(own)) or 0
        for end in (sa.func.min, sa.func.max)
    )
    best = sa.select(step).where(own).order_by(job_metrics.c.validation_loss, step).limit(1)
    spaced = _spaced(own, (last - first) // (most - 2) + 1)
    return {first, last, *connection.scalars(best), *connection.scalars(spaced)}, True


def _spaced(own: sa.ColumnElement[bool], width: int) -> sa.Select[tuple[int]]:
    """Measured steps, each at least `width` behind the one before; the index is asked once for each of them."""
    step = job_metrics.c.step
    picked = sa.select(sa.func.min(step).label("step")).where(own).cte("picked", recursive=True)
    behind = sa.select(sa.func.min(step)).where(own, step >= picked.c.step + width)
    more = sa.select(behind.scalar_subquery()).where(picked.c.step.is_not(None))
    found = picked.union_all(more).c.step
    return sa.select(found).where(found.is_not(None))


def steps_after(
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
