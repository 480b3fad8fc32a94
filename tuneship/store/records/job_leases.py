"""Leases on jobs, with a fencing token: claim, heartbeat, write, release. A job never has two live attempts.

A claim raises `attempt`, the fencing token. Every later write names the job's id and its attempt, and must change
exactly one row; if it changes none, the lease is lost (`LeaseLost`), and the holder stops writing and kills its worker.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self, cast

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import JobRow, jobs
from tuneship.store.records import job_queue

# The lease-keeping thread renews it three times as often. A job whose service has died waits at most this long.
LEASE = timedelta(seconds=30)
IS_RUNNING = jobs.c.status == JobStatus.RUNNING
IS_LIVE = jobs.c.lease_until.is_not(None)


class LeaseLost(Exception):
    """Another attempt owns the job now, or it has ended."""


@dataclass(frozen=True)
class JobLease:
    """The right of one attempt to work on its job."""

    job_id: str
    attempt: int
    # The job's tenant, whose rows its holder writes.
    client_id: str

    @classmethod
    def of(cls, job: Row) -> Self:
        """The lease of the attempt that a row names."""
        return cls(job["id"], job["attempt"], job["client_id"])


def claim(connection: sa.Connection, job_id: str, owner: str, now: datetime) -> JobRow | None:
    """Claim a job, in a transaction for its tenant; None if it does not wait any more."""
    is_it = (jobs.c.id == job_id) & job_queue.waiting(now)
    # One transaction at a time writes the tenant's rows, so nobody else claims it between this read and the write. Only
    # leases are renewed beside it, hence the lock.
    job = connection.execute(sa.select(jobs).where(is_it).with_for_update()).mappings().first()
    if job is None:
        return None
    claimed: dict[str, Any] = {
        "owner": owner,
        "attempt": job["attempt"] + 1,
        "lease_until": now + LEASE,
        "status": JobStatus.RUNNING,
        "started_at": job["started_at"] or now,
        "updated_at": now,
    }
    connection.execute(sa.update(jobs).where(jobs.c.id == job["id"]).values(**claimed))
    return cast("JobRow", {**job, **claimed})


def write(connection: sa.Connection, held: JobLease, **values: Any) -> None:
    """Change columns of a job whose lease is held. Raises `LeaseLost`."""
    if not _changed(connection, held, sa.true(), **values):
        raise LeaseLost(held.job_id)


def end(
    connection: sa.Connection, held: JobLease, status: JobStatus, now: datetime, **values: Any
) -> None:
    """End a running job with a status. Raises `LeaseLost`, also if the job was cancelled meanwhile."""
    ended = {"status": status, "lease_until": None, "updated_at": now, **values}
    if not _changed(connection, held, IS_RUNNING, **ended):
        raise LeaseLost(held.job_id)


def heartbeat(connection: sa.Connection, held: JobLease, now: datetime, **values: Any) -> None:
    """Renew the lease for another `LEASE`, and change columns of the job with it. Raises `LeaseLost`."""
    write(connection, held, lease_until=now + LEASE, **values)


def extend(connection: sa.Connection, held: JobLease, now: datetime) -> None:
    """Renew the lease of a job that has not ended. Raises `LeaseLost`."""
    if not _changed(connection, held, IS_LIVE, lease_until=now + LEASE):
        raise LeaseLost(held.job_id)


def renew(connection: sa.Connection, held: Iterable[JobLease], now: datetime) -> None:
    """Renew the leases of several jobs, except jobs that have ended or were claimed by another attempt."""
    for lease in sorted(held, key=lambda lease: lease.job_id):
        _changed(connection, lease, IS_LIVE, lease_until=now + LEASE)


def release(connection: sa.Connection, held: Iterable[JobLease], now: datetime) -> None:
    """Let these leases lapse, so that others can claim the jobs at once; their processes must have been ended."""
    for lease in sorted(held, key=lambda lease: lease.job_id):
        _changed(connection, lease, IS_RUNNING, lease_until=now - LEASE)


def release_all(connection: sa.Connection, now: datetime) -> None:
    """Let every lease lapse. Call it only when a single service starts: no process can hold one then."""
    connection.execute(sa.update(jobs).where(IS_RUNNING).values(lease_until=now - LEASE))


def _changed(
    connection: sa.Connection, held: JobLease, condition: sa.ColumnElement[bool], **values: Any
) -> bool:
    """Change columns of a job if this attempt still has it and the condition holds; returns whether it did."""
    is_held = (jobs.c.id == held.job_id) & (jobs.c.attempt == held.attempt)
    changed = connection.execute(sa.update(jobs).where(is_held, condition).values(**values))
    return changed.rowcount == 1
