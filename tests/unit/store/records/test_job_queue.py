"""The queue is fair: interrupted jobs come first, then tenants take turns."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases.job_rows import NOW, long_queue
from tests.unit.store.records.test_store import add_job, claim
from tuneship.contract.jobs import JobStatus
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.records import job_leases, job_queue
from tuneship.store.records.job_leases import LEASE
from tuneship.store.records.job_queue import QueuedJob, TenantUsage, fair_order

pytestmark = pytest.mark.both_databases


def fill(database: Database, *names: str) -> None:
    """Add a job for each name, in this order. The first letter of a name is its tenant."""
    for number, name in enumerate(names):
        came = NOW + timedelta(seconds=number)
        add_job(database, name, client_id=name[0], created_at=came)


def line(database: Database, now: datetime) -> list[str]:
    with database.read() as connection:
        return job_queue.queue_order(connection, now)


def started(database: Database, now: datetime) -> str:
    forecast = line(database, now)
    row = claim(database, now)
    assert row is not None
    assert row["id"] == forecast[0]
    return row["id"]


def test_a_tenant_with_many_jobs_does_not_hold_up_the_others(database: Database) -> None:
    fill(database, "a1", "a2", "a3", "a4", "b1", "c1", "b2")
    forecast = line(database, NOW)
    assert forecast == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    at = [NOW + timedelta(seconds=10 + number) for number in range(7)]
    assert [started(database, one) for one in at] == forecast
    assert claim(database, at[-1]) is None


@pytest.mark.slow
@pytest.mark.soak
def test_ten_thousand_jobs_of_a_hundred_tenants_start_in_the_order_of_turns(
    database: Database,
) -> None:
    with database.write() as connection:
        connection.execute(sa.insert(tables.jobs), [*long_queue(10_000, 100)])
    came = NOW + timedelta(minutes=1)
    forecast = line(database, came)
    assert len(forecast) == 10_000
    claimed = [claim(database, came + timedelta(milliseconds=number)) for number in range(300)]
    assert [job["id"] for job in claimed if job is not None] == forecast[:300]
    turns = [{job["client_id"] for job in claimed[n : n + 100] if job} for n in (0, 100)]
    assert [len(tenants) for tenants in turns] == [100, 100]


def test_among_tenants_with_as_many_running_the_one_that_waited_longest_is_next(
    database: Database,
) -> None:
    fill(database, "a1", "b1", "a2", "b2")
    now = NOW + timedelta(minutes=1)
    assert [started(database, now), started(database, now + timedelta(seconds=1))] == ["a1", "b1"]
    assert line(database, now + timedelta(seconds=2)) == ["a2", "b2"]


def test_an_interrupted_job_goes_on_before_any_other_starts(database: Database) -> None:
    fill(database, "a1")
    assert started(database, NOW) == "a1"
    fill(database, "b1", "c1")
    lapsed = NOW + LEASE + timedelta(seconds=1)
    assert line(database, NOW + LEASE / 2) == ["b1", "c1"]
    assert line(database, lapsed) == ["a1", "b1", "c1"]
    again = claim(database, lapsed)
    assert again is not None
    assert (again["id"], again["attempt"], again["started_at"]) == ("a1", 2, NOW)


def test_a_dead_service_gives_no_tenant_a_running_job(database: Database) -> None:
    fill(database, "a1", "a2", "b1")
    assert started(database, NOW) == "a1"
    with database.read() as connection:
        alive = job_queue._usage(connection, NOW)
        lapsed = job_queue._usage(connection, NOW + LEASE + timedelta(seconds=1))
    assert alive == {"a": TenantUsage(1, NOW), "b": TenantUsage()}
    assert lapsed == {"a": TenantUsage(0, NOW), "b": TenantUsage()}


@pytest.mark.parametrize(
    ("loads", "order"),
    [
        ({}, ["a1", "b1", "a2", "b2", "a3"]),
        ({"a": TenantUsage(2)}, ["b1", "b2", "a1", "a2", "a3"]),
        ({"a": TenantUsage(1), "b": TenantUsage(2)}, ["a1", "b1", "a2", "b2", "a3"]),
        ({"a": TenantUsage(0, datetime(2026, 1, 1, tzinfo=UTC))}, ["b1", "a1", "b2", "a2", "a3"]),
    ],
)
def test_turns_by_what_each_tenant_has_had(loads: dict[str, Any], order: list[str]) -> None:
    fresh = [("a", "a1"), ("a", "a2"), ("b", "b1"), ("b", "b2"), ("a", "a3")]
    assert fair_order(fresh, loads) == order


def test_a_started_job_is_not_in_line(database: Database) -> None:
    add_job(database, "ft_1", status=JobStatus.COMPLETED)
    add_job(database, "ft_2", status=JobStatus.CANCELLING)
    assert line(database, NOW) == []


def test_a_job_that_its_process_works_on_is_passed_over(database: Database) -> None:
    fill(database, "a1", "b1", "a2", "b2")
    with database.read() as connection:
        following = [
            job_queue.first_in_line(connection, NOW, held)
            for held in ((), ("a1",), ("a1", "a2"), ("a1", "a2", "b1", "b2"))
        ]
    assert following == [
        QueuedJob("a1", "a"), QueuedJob("a2", "a"), QueuedJob("b1", "b"), None,
    ]  # fmt: skip


def test_a_job_that_was_cancelled_after_the_look_is_not_claimed(database: Database) -> None:
    fill(database, "a1")
    with database.read() as connection:
        first = job_queue.first_in_line(connection, NOW)
    assert first == QueuedJob("a1", "a")
    with database.write("a") as connection:
        rows.change(connection, tables.jobs, "a1", NOW, status=JobStatus.CANCELLING)
    with database.write("a") as connection:
        assert job_leases.claim(connection, "a1", "owner", NOW) is None
