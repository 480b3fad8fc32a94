"""Leases with fencing on the jobs table: claim, beat, write, release. One live attempt per job, ever.

A claim raises `attempt`; every later write says `id and attempt` and must touch exactly one row. Zero rows mean that
the lease is lost: `LeaseLost`, and the holder writes nothing more and kills its worker.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.store import job_queue
from tuneship.store.queries import Row
from tuneship.store.tables import jobs

LEASE = timedelta(seconds=30)


class LeaseLost(Exception):
    """Somebody else owns the row now."""


@dataclass(frozen=True)
class JobLease:
    """The right to work on one job."""

    job_id: str
    attempt: int


def claim(
    connection: sa.Connection, owner: str, now: datetime, held: Collection[str] = ()
) -> Row | None:
    """Take the job that is next in line (`job_queue.py`); None when none waits.

    `held`: ids of those that the owner works on. It may have stood still for longer than their leases, and goes on.
    """
    line = [one for one in job_queue.queue_order(connection, now) if one not in held]
    if not line:
        return None
    found = connection.execute(sa.select(jobs).where(jobs.c.id == line[0])).mappings().one()
    taken = {
        "owner": owner,
        "attempt": found["attempt"] + 1,
        "lease_until": now + LEASE,
        "status": JobStatus.RUNNING,
        "started_at": found["started_at"] or now,
        "updated_at": now,
    }
    connection.execute(sa.update(jobs).where(jobs.c.id == found["id"]).values(**taken))
    return {**found, **taken}


def write(connection: sa.Connection, held: JobLease, **values: Any) -> None:
    """Change the job's row under the claim. Raises `LeaseLost`."""
    result = connection.execute(
        sa.update(jobs)
        .where(jobs.c.id == held.job_id, jobs.c.attempt == held.attempt)
        .values(**values)
    )
    if result.rowcount != 1:
        raise LeaseLost(held.job_id)


def end(
    connection: sa.Connection, held: JobLease, status: JobStatus, now: datetime, **values: Any
) -> None:
    """Leave the state `running` under the claim. Raises `LeaseLost` when somebody has cancelled meanwhile."""
    result = connection.execute(
        sa.update(jobs)
        .where(
            jobs.c.id == held.job_id,
            jobs.c.attempt == held.attempt,
            jobs.c.status == JobStatus.RUNNING,
        )
        .values(status=status, lease_until=None, updated_at=now, **values)
    )
    if result.rowcount != 1:
        raise LeaseLost(held.job_id)


def heartbeat(connection: sa.Connection, held: JobLease, now: datetime, **values: Any) -> None:
    """Keep the lease for another `LEASE`, and change the job's row. Raises `LeaseLost`."""
    write(connection, held, lease_until=now + LEASE, **values)


def renew(connection: sa.Connection, held: Iterable[JobLease], now: datetime) -> None:
    """Keep the leases of several jobs. One that has ended, or that somebody else has claimed, is left as it is."""
    for one in held:
        is_held = (jobs.c.id == one.job_id) & (jobs.c.attempt == one.attempt)
        is_live = jobs.c.lease_until.is_not(None)
        connection.execute(sa.update(jobs).where(is_held, is_live).values(lease_until=now + LEASE))


def release_all(connection: sa.Connection, now: datetime) -> None:
    """At the start of the only service on this database: nobody can hold a lease any more."""
    connection.execute(
        sa.update(jobs).where(jobs.c.status == JobStatus.RUNNING).values(lease_until=now - LEASE)
    )
