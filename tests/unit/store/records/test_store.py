"""Leases refuse writes of an earlier owner, and an idempotency key gives one answer."""

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from tests.support.databases.job_rows import NOW, queued_job
from tuneship.contract.errors import InvalidRequestError, ValidationFailed
from tuneship.contract.jobs import JobStatus
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.records import idempotency, job_leases, job_queue
from tuneship.store.records.job_leases import LEASE, JobLease, LeaseLost

pytestmark = pytest.mark.both_databases


def add_job(database: Database, job_id: str = "ft_1", **values: Any) -> None:
    with database.write() as connection:
        rows.insert(connection, tables.jobs, queued_job(job_id, **values))


def claim(database: Database, now: datetime) -> rows.Row | None:
    """Claim the first job, and the next one where somebody else is faster."""
    while True:
        with database.read() as connection:
            first = job_queue.first_in_line(connection, now)
        if first is None:
            return None
        with database.write(first.client_id) as connection:
            job = job_leases.claim(connection, first.job_id, "owner", now)
        if job is not None:
            return job


def test_an_error_of_the_database_carries_no_values(database: Database) -> None:
    add_job(database)
    with pytest.raises(IntegrityError) as caught:
        add_job(database, model_name="a patient")
    assert "a patient" not in str(caught.value)


def test_a_job_is_claimed_by_one_until_its_lease_lapses(database: Database) -> None:
    add_job(database)
    first = claim(database, NOW)
    assert first is not None
    assert (first["attempt"], first["status"]) == (1, "running")
    assert claim(database, NOW + LEASE) is None
    second = claim(database, NOW + LEASE + timedelta(seconds=1))
    assert second is not None
    assert (second["attempt"], second["started_at"]) == (2, NOW)


def test_a_stale_attempt_writes_nothing(database: Database) -> None:
    add_job(database)
    claim(database, NOW)
    claim(database, NOW + LEASE * 2)
    stale, live = JobLease("ft_1", 1, "alice"), JobLease("ft_1", 2, "alice")
    for change in (
        lambda one: job_leases.heartbeat(one, stale, NOW + LEASE * 3),
        lambda one: job_leases.write(one, stale, current_step=7),
        lambda one: job_leases.end(one, stale, JobStatus.COMPLETED, NOW),
    ):
        with pytest.raises(LeaseLost), database.write() as connection:
            change(connection)
    with database.write() as connection:
        job_leases.write(connection, live, current_step=3)
        assert rows.fetch(connection, tables.jobs, "ft_1", client_id=None)["current_step"] == 3  # type: ignore[index]


def test_a_job_that_is_being_cancelled_cannot_complete(database: Database) -> None:
    add_job(database)
    claim(database, NOW)
    with database.write() as connection:
        rows.change(connection, tables.jobs, "ft_1", NOW, status=JobStatus.CANCELLING)
    with pytest.raises(LeaseLost), database.write() as connection:
        job_leases.end(connection, JobLease("ft_1", 1, "alice"), JobStatus.COMPLETED, NOW)


def test_after_a_restart_running_jobs_can_be_claimed_at_once(database: Database) -> None:
    add_job(database)
    claim(database, NOW)
    with database.write() as connection:
        job_leases.release_all(connection, NOW)
    assert claim(database, NOW) is not None


def test_jobs_are_taken_oldest_first(database: Database) -> None:
    add_job(database, "ft_new", created_at=NOW + timedelta(seconds=1))
    add_job(database, "ft_old")
    assert [claim(database, NOW)["id"] for _ in range(2)] == ["ft_old", "ft_new"]  # type: ignore[index]


def test_many_who_claim_at_once_get_different_jobs(database: Database) -> None:
    for number in range(16):
        add_job(database, f"ft_{number}")
    with ThreadPoolExecutor(16) as threads:
        taken = list(threads.map(lambda _: claim(database, NOW), range(20)))
    names = [row["id"] for row in taken if row is not None]
    assert (len(names), len(set(names)), taken.count(None)) == (16, 16, 4)


def test_an_idempotency_key_is_held_used_replayed_and_forgotten(database: Database) -> None:
    key = idempotency.Key("alice", "k", "f")
    answer = idempotency.StoredAnswer(201, "/x", b"{}")

    def begin(one: idempotency.Key, now: datetime) -> Any:
        with database.write() as connection:
            return idempotency.begin(connection, one, now)

    hold = begin(key, NOW)
    with pytest.raises(InvalidRequestError) as busy:
        begin(key, NOW)
    assert (busy.value.status, busy.value.retryable) == (409, True)
    later = begin(key, NOW + idempotency.LOCK)
    with pytest.raises(InvalidRequestError), database.write() as connection:
        idempotency.finish(connection, hold, answer)
    with database.write() as connection:
        # The key belongs to a later request by now.
        idempotency.abandon(connection, hold)
        idempotency.finish(connection, later, answer)
    assert begin(key, NOW) == answer
    with pytest.raises(ValidationFailed):
        begin(idempotency.Key("alice", "k", "other"), NOW)
    assert isinstance(begin(idempotency.Key("bob", "k", "other"), NOW), idempotency.Hold)
    after = NOW + idempotency.KEPT + timedelta(minutes=5)
    assert isinstance(begin(key, after), idempotency.Hold)


def test_a_key_of_a_service_alone_is_kept_for_a_minute(database: Database) -> None:
    key = idempotency.Key("alice", "k", "f")
    with database.write() as connection:
        idempotency.begin(connection, key, NOW)
    with pytest.raises(InvalidRequestError), database.write() as connection:
        idempotency.begin(connection, key, NOW + idempotency.LOCK / 2, member=1)
