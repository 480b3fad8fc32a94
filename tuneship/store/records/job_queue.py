"""The order in which waiting jobs get a training process: fair among tenants.

Interrupted jobs come first. Then the tenants take turns: the tenant with the fewest running jobs comes next, and among
equals the one whose last job started longest ago. Jobs of the same tenant start in the order of their creation.
`job_leases.py` claims the first job of the queue; `tuneship/service/jobs/handlers.py` shows a job's position in it.
"""

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.store.database.tables import jobs

NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, order=True)
class TenantUsage:
    """How much of the machine a tenant uses; the smallest comes first in the queue."""

    running: int = 0
    last_started: datetime = NEVER


def waiting(now: datetime) -> sa.ColumnElement[bool]:
    """Condition for queued jobs, and for running ones whose lease has lapsed because their service died."""
    lapsed = (jobs.c.status == JobStatus.RUNNING) & (jobs.c.lease_until < now)
    return (jobs.c.status == JobStatus.QUEUED) | lapsed


@dataclass(frozen=True)
class QueuedJob:
    """A waiting job and its tenant."""

    job_id: str
    client_id: str


def first_in_line(
    connection: sa.Connection, now: datetime, held: Collection[str] = ()
) -> QueuedJob | None:
    """The job that starts next; None if none waits. The rest of the queue is not read.

    `held`: ids of the jobs on which the asking process works already. If it was suspended for longer than a lease,
    they look abandoned, although it continues them.
    """
    query = (
        sa.select(jobs.c.id, jobs.c.client_id)
        .where(waiting(now), jobs.c.id.not_in(held))
        .order_by(jobs.c.created_at, jobs.c.id)
        .limit(1)
    )
    interrupted = connection.execute(query.where(jobs.c.attempt > 0)).first()
    if interrupted is not None:
        return QueuedJob(*interrupted)
    usage = _usage(connection, now)
    for client_id in sorted(usage, key=lambda client_id: (usage[client_id], client_id)):
        is_fresh = (jobs.c.status == JobStatus.QUEUED) & (jobs.c.attempt == 0)
        own = query.where(jobs.c.client_id == client_id, is_fresh)
        found = connection.execute(own).first()
        if found is not None:  # else this process works on the tenant's only ones
            return QueuedJob(*found)
    return None


def queue_order(connection: sa.Connection, now: datetime) -> list[str]:
    """The ids of all waiting jobs, in the order in which they will start."""
    query = (
        sa.select(jobs.c.id, jobs.c.client_id, jobs.c.attempt)
        .where(waiting(now))
        .order_by(jobs.c.created_at, jobs.c.id)
    )
    rows = connection.execute(query).all()
    interrupted = [row.id for row in rows if row.attempt > 0]
    fresh = [(row.client_id, row.id) for row in rows if row.attempt == 0]
    usage = _usage(connection, now)
    return interrupted + fair_order(fresh, usage)


def fair_order(fresh: Sequence[tuple[str, str]], usage: Mapping[str, TenantUsage]) -> list[str]:
    """Order new jobs fairly; `fresh` are pairs of a tenant and a job id, oldest first. Returns the job ids.

    Beyond the first job the order is a forecast, which assumes that no running job ends.
    """
    queues: dict[str, deque[str]] = {}
    for client, job_id in fresh:
        queues.setdefault(client, deque()).append(job_id)
    heap = [(usage.get(client, TenantUsage()), client) for client in queues]
    heapq.heapify(heap)
    order: list[str] = []
    started = max((used.last_started for used, _ in heap), default=NEVER)
    while heap:
        used, client = heapq.heappop(heap)
        order.append(queues[client].popleft())
        # Each forecast start is later than those before it, by the smallest step.
        started += datetime.resolution
        if queues[client]:
            heapq.heappush(heap, (TenantUsage(used.running + 1, started), client))
    return order


def _usage(connection: sa.Connection, now: datetime) -> dict[str, TenantUsage]:
    """Read how much each tenant with a queued job uses, by two index look-ups per tenant that skip its ended jobs."""
    tenants = (
        sa.select(jobs.c.client_id)
        .where(jobs.c.status == JobStatus.QUEUED)
        .distinct()
        .subquery("tenants")
    )
    own = jobs.c.client_id == tenants.c.client_id
    running = sa.select(sa.func.count()).where(
        own, jobs.c.status == JobStatus.RUNNING, jobs.c.lease_until >= now
    )
    last_started = sa.select(sa.func.max(jobs.c.started_at)).where(own)
    query = sa.select(
        tenants.c.client_id, running.scalar_subquery(), last_started.scalar_subquery()
    )
    return {
        client: TenantUsage(count, last or NEVER)
        for client, count, last in connection.execute(query)
    }
