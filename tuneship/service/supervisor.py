"""Brings reality in line with the rows: has jobs run, loads and unloads deployments, looks after leases.

Three loops on the service's event loop, so that none waits for another: deployments, jobs, and what is recorded and
forgotten. Leases have a thread of their own (`endpoints/lease_expiry.py`). Blocking work goes to threads that no
request uses; processes are started on the main thread (their parent-death signal follows it). Everything known here
can be lost: after a restart the rows and checkpoints suffice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.runtime.worker_protocol import Runtime
from tuneship.service.common.shutdown import end_tasks
from tuneship.service.context.context import Parts
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.service.deployments.reconciler import DeploymentKeeper
from tuneship.service.endpoints.lease_expiry import LeaseKeeper
from tuneship.service.jobs.local_launcher import LocalTrainingLauncher
from tuneship.service.jobs.runner import TrainingKeeper
from tuneship.store import deployment_logs, idempotency, metric_windows
from tuneship.store import outbox as events

logger = logging.getLogger(__name__)

TICK_S = 0.2
AFTER_A_FAILURE_S = 1.0
LOGS_KEPT = timedelta(days=30)
# Of one deployment.
MOST_LOG_LINES = 10_000
FORGET_EVERY = timedelta(hours=1)
# Of metrics and deployment logs; whoever reads either stores it first, so only a kill can lose as
# much.
STORE_EVERY = timedelta(milliseconds=800)
# How long the end waits for each of these; together less than `ending.TASKS_END_S`.
LOOPS_END_S, THREADS_END_S, STORE_S = 1.0, 3.0, 2.0


class Supervisor:
    """The loops over jobs, deployments and leases."""

    def __init__(self, parts: Parts, runtime: Runtime, work: Path, owner: str) -> None:
        """`work`: folder for attempts and checkpoints; `owner`: this process in lease rows."""
        self._parts = parts
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = Threads("records", 1)
        self._keeper = DeploymentKeeper(parts)
        training_threads = Threads("training", 4)
        launcher = LocalTrainingLauncher(parts, runtime, work, training_threads)
        self._trainings = TrainingKeeper(parts, launcher, owner, training_threads)
        self._datasets = DatasetProcessing(parts)
        self._leases = LeaseKeeper(parts, self._trainings.held)
        self._forget_at = self._store_at = parts.clock()

    def wake(self) -> None:
        """Look at the rows now; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)
            self._loop.call_soon_threadsafe(self._datasets.wake)

    async def run(self) -> None:
        """Until cancelled; then training processes are ended, to go on from their checkpoint later."""
        self._loop = asyncio.get_running_loop()
        self._leases.start()
        loops = [
            asyncio.create_task(work)
            for work in (
                self._warm(),
                self._datasets.run(),
                self._repeat(self._keeper.reconcile),
                self._repeat(self._trainings.tick),
                self._repeat(self._keep_records),
            )
        ]
        try:
            await asyncio.wait(loops)
        finally:
            await self._end(loops)

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All that it and its keepers use, but the one for leases."""
        return (
            self._threads,
            self._trainings.threads,
            self._datasets.threads,
            *self._keeper.threads,
        )

    async def _warm(self) -> None:
        """Load again what was running before the restart, once the database lets us read it."""
        while True:
            try:
                await self._keeper.warm()
            except Exception:
                logger.exception("what was deployed could not be loaded again")
                await asyncio.sleep(AFTER_A_FAILURE_S)
            else:
                return

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        """Each loop by itself: metrics that cannot be stored must not keep a job waiting."""
        while True:
            try:
                await step()
            except (
                Exception
            ):  # the loop must outlive any single failure; the next round tries again
                logger.exception("supervision failed")
                await asyncio.sleep(AFTER_A_FAILURE_S)
            self._woken.clear()
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(TICK_S):
                    await self._woken.wait()

    async def _end(self, loops: list["asyncio.Task[None]"]) -> None:
        """Nothing is waited for without a limit: what hangs is left behind, and everything else still ends."""
        self._trainings.stop()
        await end_tasks(loops, LOOPS_END_S)
        await self._keeper.stop(LOOPS_END_S)
        await asyncio.gather(*(one.finish(THREADS_END_S) for one in self.threads))
        for store in (self._parts.store_metrics, self._parts.store_logs):
            try:
                async with asyncio.timeout(STORE_S):
                    await Threads("last records", 1).run(store)
            except Exception:
                logger.exception("the last metrics or deployment logs could not be stored")
        self._leases.stop(LOOPS_END_S)

    async def _keep_records(self) -> None:
        await self._threads.run(self._store_recorded)
        await self._threads.run(self._forget_old)

    def _store_recorded(self) -> None:
        """Not at every tick: each time rewrites a row of a second, a minute and an hour for every series."""
        now = self._parts.clock()
        if _is_early(now, self._store_at, STORE_EVERY):
            return
        self._store_at = now + STORE_EVERY
        self._parts.store_metrics()
        self._parts.store_logs()

    def _forget_old(self) -> None:
        """Metrics, logs, events and idempotency keys, each beyond the time for which it is kept."""
        may_forget, now = self._parts.clock_watch.may_forget(), self._parts.clock()
        if not may_forget or _is_early(now, self._forget_at, FORGET_EVERY):
            return
        self._forget_at = now + FORGET_EVERY
        for forget in (
            partial(metric_windows.forget, now=now.timestamp()),
            partial(deployment_logs.forget, before=now - LOGS_KEPT, most=MOST_LOG_LINES),
            partial(events.forget, now=now),
            partial(idempotency.forget, now=now),
        ):
            with self._parts.database.write() as connection:  # requests wait for one of them only
                forget(connection)


def _is_early(now: datetime, due: datetime, every: timedelta) -> bool:
    """Whether it is not time yet; when the clock was set back, it is."""
    return due - every <= now < due
