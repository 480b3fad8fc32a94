"""The rows that belong to a job: its metrics by step, and its log."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import ALIVE
from tuneship.store.database.rows import fetch_all, matching
from tuneship.store.database.tables import (
    JobLogRow,
    JobMetricsRow,
    JobRow,
    job_logs,
    job_metrics,
    job_row_losses,
    jobs,
)

SHOWN = (
    job_metrics.c.step,
    job_metrics.c.epoch,
    job_metrics.c.training_loss,
    job_metrics.c.validation_loss,
    job_metrics.c.learning_rate,
    job_metrics.c.accuracy,
    job_metrics.c.perplexity,
)
# The most steps that one answer holds: a plot shows no more, and the answer takes about 20 ms.
MOST_STEPS = 5_000
# How many steps of a thinned curve are kept without a gap, half of them at its beginning and half at its end, because
# whether a running job diverges is decided by its last steps.
UNTHINNED_STEPS = 500
STEPS_PER_QUERY = 500


def is_dataset_needed(connection: sa.Connection, dataset_id: str) -> bool:
    """Whether a job that has not ended trains or validates on a dataset."""
    # The index on the status finds the few jobs that have not ended.
    uses_it = sa.or_(jobs.c.dataset_id == dataset_id, jobs.c.validation_dataset_id == dataset_id)
    query = sa.select(jobs.c.id).where(jobs.c.status.in_(ALIVE), uses_it).limit(1)
    return connection.execute(query).first() is not None


def security_settings_of(
    connection: sa.Connection, client_id: str, model_names: Iterable[str]
) -> Sequence[Mapping[str, Any]]:
    """The `security_settings` of the jobs that tuned these models, as rows with this one column.

    Base models have no job. The id of a tuned model contains that of its job, so deleted models are covered too.
    """
    ids = {f"ft_{name.rpartition(':')[2]}" for name in model_names if name.startswith("ft:")}
    return security_settings_by_id(connection, client_id, ids)


def security_settings_by_id(
    connection: sa.Connection, client_id: str, ids: Collection[str]
) -> Sequence[Mapping[str, Any]]:
    """The `security_settings` of the client's jobs with these ids, as rows with this one column."""
    if not ids:
        return []
    query = sa.select(jobs.c.security_settings).where(
        jobs.c.client_id == client_id, jobs.c.id.in_(ids)
    )
    return fetch_all(connection, query)


def alive(connection: sa.Connection) -> Sequence[JobRow]:
    """The jobs of all tenants that have not ended."""
    return matching(connection, jobs, jobs.c.status.in_(ALIVE))


def add_log(
    connection: sa.Connection, job_id: str, now: datetime, level: str, message: str
) -> None:
    """Append an entry to the job's log; `message` must not hold text of a dataset.

    A tenant has one writer at a time, so the ids in a job's log rise in the order of the commits.
    """
    connection.execute(
        sa.insert(job_logs).values(job_id=job_id, timestamp=now, level=level, message=message)
    )


def add_log_once(
    connection: sa.Connection, job_id: str, now: datetime, level: str, message: str
) -> None:
    """Append an entry unless the log has the same message, since a resumed attempt repeats earlier messages."""
    query = sa.select(job_logs.c.id).where(
        job_logs.c.job_id == job_id, job_logs.c.message == message
    )
    if connection.execute(query.limit(1)).first() is None:
        add_log(connection, job_id, now, level, message)


def logs_of(
    connection: sa.Connection, job_id: str, *, after: int, limit: int
) -> Sequence[JobLogRow]:
    """The next entries after the id `after`, oldest first."""
    query = (
        sa.select(job_logs)
        .where(job_logs.c.job_id == job_id, job_logs.c.id > after)
        .order_by(job_logs.c.id)
        .limit(limit)
    )
    return fetch_all(connection, query)


def mark_epoch_reported(connection: sa.Connection, job_id: str, epoch: int) -> bool:
    """Record that the end of an epoch is reported; returns False if an earlier attempt has reported it."""
    result = connection.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.epochs_told < epoch)
        .values(epochs_told=epoch)
    )
    return result.rowcount == 1


def put_metrics(connection: sa.Connection, job_id: str, steps: Sequence[dict[str, Any]]) -> None:
    """Store steps by (job, step); a repeated step replaces the earlier one.

    Each step also stores the id of the newest log entry, which is its position in the job's stream.
    """
    if not steps:
        return
    by_step = {step["step"]: step for step in steps}
    connection.execute(
        sa.delete(job_metrics).where(
            job_metrics.c.job_id == job_id, job_metrics.c.step.in_(by_step)
        )
    )
    newest = sa.select(sa.func.coalesce(sa.func.max(job_logs.c.id), 0))
    log_id = connection.execute(newest.where(job_logs.c.job_id == job_id)).scalar_one()
    common = {"job_id": job_id, "log_id": log_id}
    connection.execute(sa.insert(job_metrics), [{**step, **common} for step in by_step.values()])


def put_row_losses(connection: sa.Connection, job_id: str, losses: Mapping[str, Any]) -> None:
    """Store the losses of a job's validation rows; those of a later attempt replace them."""
    connection.execute(sa.delete(job_row_losses).where(job_row_losses.c.job_id == job_id))
    connection.execute(sa.insert(job_row_losses).values(job_id=job_id, losses=losses))


def row_losses_of(connection: sa.Connection, job_id: str) -> dict[str, Any] | None:
    """The losses of a job's validation rows; None without any."""
    query = sa.select(job_row_losses.c.losses).where(job_row_losses.c.job_id == job_id)
    return connection.scalar(query)


def last_step_of(connection: sa.Connection, job_id: str) -> int:
    """The highest step that any attempt has reported; 0 before the first."""
    query = sa.select(sa.func.coalesce(sa.func.max(job_metrics.c.step), 0))
    return connection.execute(query.where(job_metrics.c.job_id == job_id)).scalar_one()


@dataclass(frozen=True)
class StepRows:
    """Steps of a job in ascending order."""

    rows: Sequence[sa.Row[Any]]
    # Whether stored steps were left out because there are too many for one answer.
    is_thinned: bool


def curve_of(
    connection: sa.Connection,
    job_id: str,
    *,
    evaluated_only: bool,
    most: int = MOST_STEPS,
    columns: Sequence["sa.ColumnElement[Any]"] = SHOWN,
) -> StepRows:
    """All steps of a job, or only those with an evaluation, thinned to about `most` if there are more.

    A thinned curve keeps every evaluated step (if those alone are too many, the best and every nth of them), its
    beginning and its end without gaps, and every nth step between. Steps that are left out are not read.
    """
    parts, is_thinned = _parts_of_curve(connection, job_id, evaluated_only, most)
    rows = list[sa.Row[Any]]()
    for part in parts:
        query = sa.select(*columns).where(part).order_by(job_metrics.c.step)
        rows += connection.execute(query).all()
    return StepRows(rows, is_thinned)


@dataclass(frozen=True)
class CurveSize:
    """Counts of a curve: its steps, its evaluations, and the digits of all its numbers."""

    steps: int = 0
    evaluated: int = 0
    digits: int = 0


def curve_size(connection: sa.Connection, job_id: str) -> CurveSize:
    """The size of `curve_of`, computed without reading its steps."""
    digits = sa.func.sum(sa.func.length(sa.cast(job_metrics.c.step, sa.Text)))
    evaluated = sa.func.count().filter(job_metrics.c.evaluated)
    parts, _ = _parts_of_curve(connection, job_id, False, MOST_STEPS)
    counts = [
        connection.execute(sa.select(sa.func.count(), evaluated, digits).where(part)).one()
        for part in parts
    ]
    return CurveSize(*(sum(one or 0 for one in column) for column in zip(*counts, strict=True)))


def _parts_of_curve(
    connection: sa.Connection, job_id: str, evaluated_only: bool, most: int
) -> tuple[Sequence["sa.ColumnElement[bool]"], bool]:
    """Conditions that select the steps of a curve, one after the other, and whether some are left out."""
    own = job_metrics.c.job_id == job_id
    # Two queries: each is one index look-up, while a single query for both would scan the index.
    first, last = (
        connection.scalar(sa.select(end(job_metrics.c.step)).where(own)) or 0
        for end in (sa.func.min, sa.func.max)
    )
    if last - first < most:
        return [own & job_metrics.c.evaluated if evaluated_only else own], False

    chosen, is_thinned = _evaluated_steps(connection, job_id, most // 2)
    if not evaluated_only:
        stride = -(-(last - first) // (most // 2 - UNTHINNED_STEPS))
        is_thinned = True
        chosen |= {*range(first, last, stride), *range(first, first + UNTHINNED_STEPS // 2)}
        chosen |= set(range(last - UNTHINNED_STEPS // 2 + 1, last + 1))

    # A database limits the number of parameters of one query.
    steps = sorted(chosen)
    begins = range(0, len(steps), STEPS_PER_QUERY)
    parts = [own & job_metrics.c.step.in_(steps[one : one + STEPS_PER_QUERY]) for one in begins]
    return parts, is_thinned


def _evaluated_steps(connection: sa.Connection, job_id: str, most: int) -> tuple[set[int], bool]:
    """At most about `most` of the steps with an evaluation, and whether some were left out."""
    own = sa.and_(job_metrics.c.job_id == job_id, job_metrics.c.evaluated)
    step = job_metrics.c.step
    steps = list(connection.scalars(sa.select(step).where(own).order_by(step).limit(most + 1)))
    if len(steps) <= most:
        return set(steps), False
    first, last = (
        connection.scalar(sa.select(end(step)).where(own)) or 0
        for end in (sa.func.min, sa.func.max)
    )
    best = sa.select(step).where(own).order_by(job_metrics.c.validation_loss, step).limit(1)

    # The query for the spaced ones is recursive, so that each of them takes one look-up in the index, and the steps
    # between are not read.
    width = (last - first) // (most - 2) + 1
    picked = sa.select(sa.func.min(step).label("step")).where(own).cte("picked", recursive=True)
    following = sa.select(sa.func.min(step)).where(own, step >= picked.c.step + width)
    more = sa.select(following.scalar_subquery()).where(picked.c.step.is_not(None))
    spaced = picked.union_all(more).c.step
    found = connection.scalars(sa.select(spaced).where(spaced.is_not(None)))
    return {first, last, *connection.scalars(best), *found}, True


def steps_after(
    connection: sa.Connection, job_id: str, *, step: int | None, log_id: int, limit: int
) -> Sequence[JobMetricsRow]:
    """Steps above `step`; with `step=None` those stored when `log_id` or a later entry was the newest of the log."""
    is_later = job_metrics.c.log_id >= log_id if step is None else job_metrics.c.step > step
    query = (
        sa.select(job_metrics)
        .where(job_metrics.c.job_id == job_id, is_later)
        .order_by(job_metrics.c.step)
        .limit(limit)
    )
    return fetch_all(connection, query)


def best_step(connection: sa.Connection, job_id: str) -> JobMetricsRow | None:
    """The measured step with the lowest validation loss, whose state a completed job has kept."""
    own = sa.and_(job_metrics.c.job_id == job_id, job_metrics.c.evaluated)
    query = sa.select(job_metrics).where(own)
    query = query.order_by(job_metrics.c.validation_loss, job_metrics.c.step).limit(1)
    found: list[JobMetricsRow] = fetch_all(connection, query)
    return found[0] if found else None


def logs_before(
    connection: sa.Connection, job_id: str, *, before: int | None, limit: int
) -> Sequence[JobLogRow]:
    """Entries up to the id `before`, newest first."""
    query = sa.select(job_logs).where(job_logs.c.job_id == job_id)
    if before is not None:
        query = query.where(job_logs.c.id <= before)
    return fetch_all(connection, query.order_by(job_logs.c.id.desc()).limit(limit))


def steps_before(
    connection: sa.Connection, job_id: str, *, before: tuple[int, int] | None, limit: int
) -> Sequence[JobMetricsRow]:
    """Steps that were stored before the place (newest entry of the log, step), newest first."""
    place = sa.tuple_(job_metrics.c.log_id, job_metrics.c.step)
    query = sa.select(job_metrics).where(job_metrics.c.job_id == job_id)
    if before is not None:
        query = query.where(place < sa.tuple_(*(sa.literal(one) for one in before)))
    order = (job_metrics.c.log_id.desc(), job_metrics.c.step.desc())
    return fetch_all(connection, query.order_by(*order).limit(limit))
