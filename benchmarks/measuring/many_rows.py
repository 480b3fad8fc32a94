"""Measures what many rows cost the leader of a cluster, in this process, on PostgreSQL with fsync.

The service runs with played replicas, since only its own work is measured: a check of all deployments, a storing of
metrics, the claim of the next job of a long queue, and how much of a rate window members use together.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import sqlalchemy as sa

from tests.support.cluster.members import LEASE_S
from tests.support.databases.job_rows import long_queue
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.in_process import Service
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.service.cluster.leadership import SoleService
from tuneship.service.composition import health_checks, scaling_decisions
from tuneship.service.http.shared_rate_limits import SharedRateLimits
from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.records import job_leases, job_queue

MODELS, DEPLOYMENTS = 1_000, 200
ROUNDS, EACH = 20, 5
JOBS, TENANTS, CLAIMS = 10_000, 100, 300
MEMBERS, CLIENTS, LIMIT, WINDOWS = 3, 16, 600, 3
START = datetime(2026, 7, 1, tzinfo=UTC)


def measure(postgres: Cluster) -> None:
    """Measure all, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        url = postgres.new_database()
        settings: dict[str, Any] = {"database_url": url, "maximum_deployments": DEPLOYMENTS}
        with Service(Path(folder), lease_s=LEASE_S, **settings) as service:
            deployments = deploy_many(service)
            service.rest()
            measure_checks(service)
            measure_flushes(service, deployments)
    url = postgres.new_database()
    with closing(Database(url)) as database:
        measure_claims(database)
    with ExitStack() as opened:
        databases = [
            opened.enter_context(closing(Database(url, is_shared=True))) for _ in range(MEMBERS)
        ]
        asyncio.run(measure_rates(databases))


# Models and deployments.


def deploy_many(service: Service) -> list[str]:
    """Train a model, copy its row, and deploy some of the copies."""
    model = service.model()
    with service.database.write() as connection:
        query = sa.select(tables.models).where(tables.models.c.id == model)
        row: dict[str, Any] = dict(connection.execute(query).mappings().one())
        copies = [row | {"id": f"{model}-{number}"} for number in range(1, MODELS)]
        connection.execute(sa.insert(tables.models), copies)
    made = range(1, DEPLOYMENTS + 1)
    return [service.deployment(f"d{number}", model_name=f"{model}-{number}") for number in made]


def measure_checks(service: Service) -> None:
    """Print how long the leader checks all deployments, without its fence."""
    leadership = SoleService()
    plan = scaling_decisions(service.parts, leadership)
    checks = health_checks(service.parts, plan, leadership)

    async def check_all() -> float:
        checks.begin()
        began = time.perf_counter()
        checks.start_when_due()
        while pending := [task for task in checks.tasks if not task.done()]:
            await asyncio.gather(*pending)
        return (time.perf_counter() - began) * 1000

    first, *later = [service.run(check_all()) for _ in range(ROUNDS)]
    watched = {one.row["health"] for one in checks.watched()}
    if len(checks.watched()) != DEPLOYMENTS or watched != {"healthy"}:
        raise SystemExit("not all deployments were checked: there are no figures")
    print(f"a round over {DEPLOYMENTS} deployments of {MODELS:,} models: {spread(later)}")
    print(f"the first round of a leader, which finds their models: {first:.0f} ms")


def measure_flushes(service: Service, deployments: list[str]) -> None:
    """Print how long the counts of a moment are stored, with two busy series for each deployment."""
    spans, cpu = list[float](), list[float]()
    for _ in range(ROUNDS):
        for deployment in deployments:
            for endpoint in ("", "ep"):
                for _ in range(EACH):
                    service.parts.recorder.record(observation(deployment, endpoint))
        began, computed = time.perf_counter(), time.process_time()
        service.supervisor.records.store_metrics()
        spans.append((time.perf_counter() - began) * 1000)
        cpu.append((time.process_time() - computed) * 1000)
    for deployment in deployments:
        path = f"/v1/deployments/{deployment}/metrics?interval=1m&metrics=error_rate"
        counted = service.call("GET", path).json()["summary"]["error_rate"]["request_count"]
        if counted != 2 * EACH * ROUNDS:
            raise SystemExit("what was stored is not what was recorded: there are no figures")
    own = f"{median(cpu):.0f} ms of them CPU of this process"
    print(f"metrics of {DEPLOYMENTS} busy deployments are stored in: {spread(spans)}, {own}")


def observation(deployment: str, endpoint: str) -> Observation:
    """A request that has just ended."""
    now = datetime.now(UTC).timestamp()
    return Observation(deployment, endpoint, now, RequestOutcome.SUCCESS, 100.0, 20, 5)


# The queue of jobs.


def measure_claims(database: Database) -> None:
    """Print how long it takes to find and claim the next job of a long queue."""
    with database.write() as connection:
        connection.execute(sa.insert(tables.jobs), [*long_queue(JOBS, TENANTS)])
        connection.execute(sa.text("analyze jobs"))
    began = START + timedelta(hours=1)
    with database.read() as connection:
        forecast = job_queue.queue_order(connection, began)[:CLAIMS]
    spans, claimed = list[float](), list[str]()
    for number in range(CLAIMS):
        now, begun = began + timedelta(milliseconds=number), time.perf_counter()
        claimed.append(claim(database, now))
        spans.append((time.perf_counter() - begun) * 1000)
    if claimed != forecast:
        raise SystemExit("the tenants did not take turns: there are no figures")
    text = f"{spread(spans)}, p99 {quantiles(spans, n=100)[-1]:.1f} ms"
    print(f"a job of {JOBS:,} of {TENANTS} tenants is claimed in: {text}")


def claim(database: Database, now: datetime) -> str:
    """Claim the next job as the leader does; returns its id."""
    with database.read() as connection:
        first = job_queue.first_in_line(connection, now)
    if first is None:
        raise SystemExit("the queue is empty")
    with database.write(first.client_id) as connection:
        job_leases.claim(connection, first.job_id, "owner", now)
    return first.job_id


# Rate windows.


async def measure_rates(databases: list[Database]) -> None:
    """Print how much of their windows clients use who ask one member or another."""
    moment = [START]
    members = [SharedRateLimits(LIMIT, LIMIT, lambda: moment[0], one) for one in databases]
    dice, passed = random.Random(2), Counter[tuple[int, str]]()

    async def ask(window: int, client: str) -> None:
        for _ in range(LIMIT * 3 // 2):
            found = await dice.choice(members).counted(client, "control")
            passed[window, client] += found is not None and not found.exceeded

    for window in range(WINDOWS):
        await asyncio.gather(*(ask(window, f"client{number}") for number in range(CLIENTS)))
        moment[0] += timedelta(minutes=1)
    if max(passed.values()) > LIMIT:
        raise SystemExit("more requests were passed than the limit allows: there are no figures")
    used = passed.total() / (LIMIT * CLIENTS * WINDOWS)
    least = min(passed.values()) / LIMIT
    text = f"{CLIENTS} clients over {MEMBERS} members, {WINDOWS} windows of {LIMIT}"
    print(f"share of a rate window that is used: {used:.1%}, at least {least:.1%}: {text}")


def spread(spans: list[float]) -> str:
    """The median and the range of some times."""
    return f"{median(spans):.1f} ms ({min(spans):.1f} to {max(spans):.1f})"
