"""Jobs that wait for a training process, in the order in which they get one: fair among tenants.

A job that was interrupted goes on first. Then the tenants take turns: whoever has the fewest jobs running, and of those
whoever waited longest since a job of theirs started. A tenant's own jobs start in the order in which they came.
Next: `job_leases.py` (who takes the first), `tuneship/service/jobs/handlers.py` (who shows the place).
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.store.tables import jobs

NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, order=True)
class TenantUsage:
    """What a tenant has had of the machine."""

    running: int = 0
    last_started: datetime = NEVER


def waiting(now: datetime) -> sa.ColumnElement[bool]:
    """Queued jobs, and running ones whose lease has lapsed: the service that ran them is dead."""
    lapsed = (jobs.c.status == JobStatus.RUNNING) & (jobs.c.lease_until < now)
    return (jobs.c.status == JobStatus.QUEUED) | lapsed


def queue_order(connection: sa.Connection, now: datetime) -> list[str]:
    """The ids of all that wait, the next one first."""
    query = (
        sa.select(jobs.c.id, jobs.c.client_id, jobs.c.attempt)
        .where(waiting(now))
        .order_by(jobs.c.created_at, jobs.c.id)
    )
    found = connection.execute(query).all()
    interrupted = [row.id for row in found if row.attempt > 0]
    fresh = [(row.client_id, row.id) for row in found if row.attempt == 0]
    return interrupted + turns(fresh, _loads(connection, {client for client, _ in fresh}, now))


def turns(fresh: Sequence[tuple[str, str]], loads: Mapping[str, TenantUsage]) -> list[str]:
    """Pairs of a tenant and its job, oldest first, become the ids of jobs in the order of their turns.

    Past the first it is a forecast: it takes a started job as running until the last one has started.
    """
    queues: dict[str, deque[str]] = {}
    for client, job_id in fresh:
        queues.setdefault(client, deque()).append(job_id)
    heap = [(loads.get(client, TenantUsage()), client) for client in queues]
    heapq.heapify(heap)
    order: list[str] = []
    turn = max((load.last_started for load, _ in heap), default=NEVER)
    while heap:
        load, client = heapq.heappop(heap)
        order.append(queues[client].popleft())
        turn += datetime.resolution
        if queues[client]:
            heapq.heappush(heap, (TenantUsage(load.running + 1, turn), client))
    return order


def _loads(connection: sa.Connection, clients: set[str], now: datetime) -> dict[str, TenantUsage]:
    """Two look-ups in indexes for each tenant: what it has had in all these years is not read."""
    tenants = (
        sa.select(jobs.c.client_id)
        .where(jobs.c.status == JobStatus.QUEUED, jobs.c.client_id.in_(clients))
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
