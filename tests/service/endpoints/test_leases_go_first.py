"""A lease that has lapsed gives its traffic back within seconds, whatever else the service waits for."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service, split
from tests.support.waiting import until
from tuneship.service.serve import SPARE_THREADS
from tuneship.store.database import tables
from tuneship.store.records.job_leases import LEASE

pytestmark = pytest.mark.both_databases
# Seconds that a busy machine may need; a blocked service would need longer.
SOON_S = 60.0


class Canary:
    """An endpoint whose candidate has the traffic until the lease ends."""

    def __init__(self, service: Service) -> None:
        self.service = service
        old, new = service.deployment("old"), service.deployment("new")
        lease = {"seconds": 60, "fallback": split({old: 100})["deployments"]}
        self.id = service.canary("c", {new: 100}, lease=lease)
        self.old = old

    def is_back(self) -> bool:
        """Read the split past the service, whose own connections may all be taken."""
        query = sa.select(tables.endpoints.c.members).where(tables.endpoints.c.id == self.id)
        engine = sa.create_engine(self.service.database.engine.url)
        try:
            with engine.connect() as connection:
                members = connection.execute(query).scalar_one()
        finally:
            engine.dispose()
        return [one["id"] for one in members] == [self.old]

    def comes_back(self) -> None:
        self.service.clock.ahead += timedelta(seconds=61)
        until(self.is_back, SOON_S)


@contextmanager
def all_taken(service: Service, *, requests: bool) -> Iterator[None]:
    """Block every thread for requests, or every thread for background work that is not reserved for leases."""
    over, busy = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        busy.release()
        over.wait(300)

    async def occupy() -> int:
        if requests:
            pool = ThreadPoolExecutor(SPARE_THREADS)
            asyncio.get_running_loop().set_default_executor(pool)
            works = [asyncio.to_thread(wait) for _ in range(SPARE_THREADS)]
            for turns in service.parts.threads.kinds:  # one tenant alone could not take them all
                works += [turns.run(f"tenant {n}", wait) for n in range(turns.threads)]
        else:
            works = [
                threads.run(wait)
                for threads in service.supervisor.threads
                for _ in range(threads.most)
            ]
        service.blocked = [asyncio.create_task(work) for work in works]  # type: ignore[attr-defined]
        return len(works)

    number = service.run(occupy())
    try:
        for _ in range(number):
            assert busy.acquire(timeout=SOON_S)
        yield
    finally:
        over.set()


def test_all_threads_of_requests_are_blocked(service: Service) -> None:
    canary = Canary(service)
    with all_taken(service, requests=True):
        canary.comes_back()


def test_all_other_threads_of_background_work_are_blocked(service: Service) -> None:
    canary = Canary(service)
    job_id = service.job()
    service.trainer_of(job_id).start_of(2)
    service.until(lambda: service.job_status(job_id) == "running")
    with all_taken(service, requests=False):
        canary.comes_back()
        # The job's lease is renewed as well, although nobody follows the job.
        before = lease_of(service, job_id)
        service.clock.ahead += LEASE
        until(lambda: lease_of(service, job_id) > before, SOON_S)


def test_the_event_loop_stands_still(service: Service) -> None:
    canary, over = Canary(service), threading.Event()
    service.loop.call_soon_threadsafe(over.wait, 300)
    try:
        canary.comes_back()
    finally:
        over.set()


def test_every_connection_is_taken_and_requests_wait_for_the_database(service: Service) -> None:
    canary, pool = Canary(service), service.database.engine.pool
    writers = [
        threading.Thread(target=write_an_event, args=[service]) for _ in range(SPARE_THREADS)
    ]
    with ExitStack() as taken:
        service.clock.ahead += timedelta(seconds=61)
        with service.database.write():
            for one in writers:
                one.start()
            until(lambda: len(service.database._turns._queues[None]._waiting) >= SPARE_THREADS)
            size: Any = pool
            for _ in range(size.size() + size._max_overflow - size.checkedout()):
                taken.enter_context(service.database.engine.connect())
        until(canary.is_back, SOON_S)
    for one in writers:
        one.join()


def write_an_event(service: Service) -> None:
    with service.database.write():
        pass


def lease_of(service: Service, job_id: str) -> Any:
    query = sa.select(tables.jobs.c.lease_until).where(tables.jobs.c.id == job_id)
    with service.database.read(first=True) as connection:
        return connection.execute(query).scalar_one()
