"""The rows of a job: evaluations, messages that are logged once, and pages after a position of its stream."""

from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases.job_rows import NOW, queued_job
from tuneship.contract.jobs import JobStatus
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.records import job_records

pytestmark = pytest.mark.both_databases


def add_job(connection: sa.Connection, job_id: str) -> None:
    row = queued_job(job_id, client_id="a", status=JobStatus.RUNNING)
    rows.insert(connection, tables.jobs, row)


def step(number: int, *, evaluated: bool = False) -> dict[str, Any]:
    names = ("training_loss", "validation_loss", "learning_rate", "epoch", "accuracy", "perplexity")
    return {"step": number, "evaluated": evaluated, **dict.fromkeys(names, 1.0)}


def behind(connection: sa.Connection, *, seen: int | None, log_id: int = 0) -> list[int]:
    found = job_records.steps_after(connection, "ft_1", step=seen, log_id=log_id, limit=9)
    return [one["step"] for one in found]


def test_steps_lie_behind_a_step_or_behind_the_log_entry_of_their_time(database: Database) -> None:
    with database.write() as connection:
        job_records.add_log(connection, "ft_1", NOW, "info", "first")
        job_records.put_metrics(connection, "ft_1", [step(1), step(2)])
        job_records.add_log(connection, "ft_2", NOW, "info", "of another job")
        job_records.add_log(connection, "ft_1", NOW, "info", "second")
        job_records.put_metrics(connection, "ft_1", [step(3)])
        job_records.put_metrics(connection, "ft_2", [step(7)])
        logs = job_records.logs_of(connection, "ft_1", after=0, limit=9)
        assert [one["message"] for one in logs] == ["first", "second"]
        assert behind(connection, seen=None) == [1, 2, 3]
        assert behind(connection, seen=None, log_id=logs[0]["id"]) == [1, 2, 3]
        assert behind(connection, seen=None, log_id=logs[1]["id"]) == [3]
        assert behind(connection, seen=2, log_id=logs[0]["id"]) == [3]


def test_a_step_reported_again_stays_one(database: Database) -> None:
    with database.write() as connection:
        job_records.put_metrics(connection, "ft_1", [step(1, evaluated=True), step(2)])
        job_records.put_metrics(connection, "ft_1", [step(2, evaluated=True), step(3), step(3)])
        every = job_records.curve_of(connection, "ft_1", evaluated_only=False)
        measured = job_records.curve_of(connection, "ft_1", evaluated_only=True)
    assert [one.step for one in every.rows] == [1, 2, 3]
    assert [one.step for one in measured.rows] == [1, 2]


def add_curve(connection: sa.Connection, steps: int, measured_every: int) -> None:
    """Add a job whose loss is lowest after three quarters of the steps."""
    lowest = steps * 3 // 4 // measured_every * measured_every
    rows = [
        {
            **step(number, evaluated=number % measured_every == 0),
            "training_loss": float(abs(number - lowest)),
            "validation_loss": float(abs(number // measured_every * measured_every - lowest)),
        }
        for number in range(1, steps + 1)
    ]
    for first in range(0, steps, 5000):
        part = rows[first : first + 5000]
        connection.execute(
            sa.insert(tables.job_metrics), [{"job_id": "ft_1", **one} for one in part]
        )


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_every_measured_step(
    database: Database,
) -> None:
    with database.write() as connection:
        add_curve(connection, 20_000, measured_every=10)
        curve = job_records.curve_of(connection, "ft_1", evaluated_only=False)
        measured = job_records.curve_of(connection, "ft_1", evaluated_only=True)
    steps = [one.step for one in curve.rows]
    assert curve.is_thinned
    assert len(steps) <= job_records.MOST_STEPS
    assert steps == sorted(set(steps))
    assert steps[:250] == list(range(1, 251))
    assert steps[-250:] == list(range(20_000 - 249, 20_001))
    assert {*range(10, 20_001, 10)} <= {*steps}
    assert max(b - a for a, b in pairwise(steps)) <= 10
    assert [one.step for one in measured.rows] == list(range(10, 20_001, 10))
    assert not measured.is_thinned


def test_from_too_many_measured_steps_the_best_and_every_nth_are_kept(database: Database) -> None:
    with database.write() as connection:
        add_curve(connection, 20_000, measured_every=2)
        for evaluated_only in (True, False):
            curve = job_records.curve_of(connection, "ft_1", evaluated_only=evaluated_only)
            steps = [one.step for one in curve.rows]
            assert curve.is_thinned
            assert len(steps) <= job_records.MOST_STEPS
            assert {2, 15_000, 20_000} <= {*steps}
            assert min(one.validation_loss for one in curve.rows) == 0


def test_as_many_steps_as_are_read_at_once_are_all_read(database: Database) -> None:
    with database.write() as connection:
        add_curve(connection, job_records.MOST_STEPS, measured_every=3)
        curve = job_records.curve_of(connection, "ft_1", evaluated_only=False)
        assert [one.step for one in curve.rows] == list(range(1, job_records.MOST_STEPS + 1))
        assert not curve.is_thinned
        assert job_records.curve_of(connection, "ft_none", evaluated_only=False).rows == []


@pytest.mark.parametrize(("steps", "measured_every"), [(0, 1), (120, 7), (20_000, 10), (20_000, 2)])
def test_a_curve_is_as_long_as_its_size_says(
    database: Database, steps: int, measured_every: int
) -> None:
    with database.write() as connection:
        if steps:
            add_curve(connection, steps, measured_every)
        size = job_records.curve_size(connection, "ft_1")
        columns = (tables.job_metrics.c.step, tables.job_metrics.c.evaluated)
        curve = job_records.curve_of(connection, "ft_1", evaluated_only=False, columns=columns)
    assert size == job_records.CurveSize(
        steps=len(curve.rows),
        evaluated=sum(one.evaluated for one in curve.rows),
        digits=sum(len(str(one.step)) for one in curve.rows),
    )


def test_the_end_of_an_epoch_is_reported_first_once(database: Database) -> None:
    with database.write() as connection:
        add_job(connection, "ft_1")
        add_job(connection, "ft_2")
        reported = [
            job_records.mark_epoch_reported(connection, "ft_1", epoch) for epoch in (1, 1, 2, 1, 3)
        ]
        assert reported == [True, False, True, False, True]
        assert job_records.mark_epoch_reported(connection, "ft_2", 1)
