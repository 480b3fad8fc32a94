"""Reconciles: makes reality match the rows of jobs, deployments, datasets, batches and leases; deletes old records.

The loops run on the service's event loop, so that none waits for another. Leases have a thread of their own
(`endpoints/lease_expiry.py`). Blocking work goes to threads that no request uses; processes are started on the main
thread, which their parent-death signal follows. All state here may be lost: after a restart the rows and checkpoints
are enough.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.runtime.worker_protocol import Runtime
from tuneship.service.batches.keeper import BatchKeeper
from tuneship.service.batches.pace import TakeSpare
from tuneship.service.common.shutdown import end_tasks
from tuneship.service.context.context import Parts
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.service.deployments import implicit
from tuneship.service.deployments.reconciler import DeploymentKeeper
from tuneship.service.endpoints.lease_expiry import LeaseKeeper
from tuneship.service.jobs.local_launcher import LocalTrainingLauncher
from tuneship.service.jobs.runner import TrainingKeeper
from tuneship.store import deployment_logs, idempotency, metric_windows, state_counts
from tuneship.store import outbox as events
from tuneship.store.quarantine import objects_of

logger = logging.getLogger(__name__)

TICK_S = 0.2
RETRY_PAUSE_S = 1.0
LOGS_KEPT_FOR = timedelta(days=30)
# Per deployment.
MAX_LOG_LINES = 10_000
FORGET_EVERY = timedelta(hours=1)
# Files without a row are set aside when they are so old: an upload comes before its row.
LEFT_OVER_AFTER = timedelta(hours=24)
# The interval for metrics and deployment logs. Readers of either store it first, so only a kill can
# lose this much.
STORE_EVERY = timedelta(milliseconds=800)
# The timeouts of the phases of the end; together less than `shutdown.TASKS_END_S`.
LOOPS_END_S, THREADS_END_S, STORE_S = 1.0, 3.0, 2.0


class Supervisor:
    """The background loops of the service."""

    def __init__(
        self,
        parts: Parts,
        runtime: Runtime,
        work: Path,
        owner: str,
        take_spare: TakeSpare,
    ) -> None:
        """`work`: folder for attempts and checkpoints; `owner`: this process in lease rows.

        `take_spare`: counts a batch's request against its tenant's limit, if there is enough left.
        """
        self._parts = parts
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = Threads("records", 1)
        self._file_threads = Threads("left-over files", 1)
        self._deployments = DeploymentKeeper(parts)
        training_threads = Threads("training", 4)
        launcher = LocalTrainingLauncher(parts, runtime, work, training_threads)
        self._trainings = TrainingKeeper(parts, launcher, owner, training_threads)
        self._datasets = DatasetProcessing(parts)
        self.batches = BatchKeeper(parts, take_spare)
        self._leases = LeaseKeeper(parts, self._trainings.held)
        self._forget_at = self._store_at = parts.clock()
        # Not at a start, when an operator may just have put an older database in place.
        self._sweep_at = parts.clock() + FORGET_EVERY

    def wake(self) -> None:
        """Reconcile now instead of at the next tick. May be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)
            self._loop.call_soon_threadsafe(self._datasets.wake)
            self._loop.call_soon_threadsafe(self.batches.wake)

    async def run(self) -> None:
        """Run until cancelled; then end the training processes, which resume from their checkpoints later."""
        self._loop = asyncio.get_running_loop()
        self._leases.start()
        loops = [
            asyncio.create_task(work)
            for work in (
                self._warm_deployments(),
                self._datasets.run(),
                self.batches.run(),
                self._repeat(self._deployments.reconcile),
                self._repeat(self._trainings.tick),
                self._repeat(self.store_and_forget),
                self._repeat(self.sweep_files),
            )
        ]
        try:
            await asyncio.wait(loops)
        finally:
            await self._end(loops)

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All threads of the loops, without the one for leases."""
        return (
            self._threads,
            self._file_threads,
            self._trainings.threads,
            self._datasets.threads,
            self.batches.threads,
            *self._deployments.threads,
        )

    async def _warm_deployments(self) -> None:
        """Load again what was running before the restart, as soon as the database can be read."""
        while True:
            try:
                await self._deployments.warm()
            except Exception:
                logger.exception("what was deployed could not be loaded again")
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception:  # the loop must outlive any failure; the next tick tries again
                logger.exception("supervision failed")
                await asyncio.sleep(RETRY_PAUSE_S)
            self._woken.clear()
            await wait_for_event(self._woken, TICK_S)

    async def _end(self, loops: list["asyncio.Task[None]"]) -> None:
        """End all loops and store the last records. Every wait has a timeout: what hangs is left behind."""
        self._trainings.stop()
        await end_tasks(loops, LOOPS_END_S)
        await self._deployments.stop(LOOPS_END_S)
        await asyncio.gather(*(threads.finish(THREADS_END_S) for threads in self.threads))
        for store in (self._parts.store_metrics, self._parts.store_logs):
            try:
                async with asyncio.timeout(STORE_S):
                    await Threads("last records", 1).run(store)
            except Exception:
                logger.exception("the last metrics or deployment logs could not be stored")
        self._leases.stop(LOOPS_END_S)

    async def store_and_forget(self) -> None:
        """Store recorded metrics and logs, and delete records beyond the time for which they are kept."""
        now = self._parts.clock()
        # Not at every tick: each time rewrites the row of a second, a minute and an hour for every series.
        if not _is_early(now, self._store_at, STORE_EVERY):
            self._store_at = now + STORE_EVERY
            await self._threads.run(self._parts.store_metrics)
            await self._threads.run(self._parts.store_logs)
        may_forget, now = self._parts.clock_watch.may_forget(), self._parts.clock()
        if may_forget and not _is_early(now, self._forget_at, FORGET_EVERY):
            self._forget_at = now + FORGET_EVERY
            await self._threads.run(self._forget_old, now)

    async def sweep_files(self) -> None:
        """Once an hour set the files aside that have no row and are older than a day, e.g. of a killed upload."""
        may_forget, now = self._parts.clock_watch.may_forget(), self._parts.clock()
        if may_forget and not _is_early(now, self._sweep_at, FORGET_EVERY):
            self._sweep_at = now + FORGET_EVERY
            await self._file_threads.run(self._set_leftovers_aside, now)

    def _set_leftovers_aside(self, now: datetime) -> None:
        # The files are listed before the rows are read, so a row that came meanwhile keeps its files.
        found = self._parts.blobs.older_than(now - LEFT_OVER_AFTER)
        with self._parts.database.read() as connection:
            unknown = found - objects_of(connection)
        place = self._parts.blobs.set_aside(unknown, now)
        if place is not None:
            text = "%d objects without a row were moved to %s, and stay there until you remove them"
            logger.warning(text, len(unknown), place)

    def _forget_old(self, now: datetime) -> None:
        # A transaction for each kind, so that requests wait for one of them only.
        database, before = self._parts.database, now - LOGS_KEPT_FOR
        with database.write() as connection:
            metric_windows.forget(connection, now=now.timestamp())
        with database.write() as connection:
            deployment_logs.forget(connection, before=before, most=MAX_LOG_LINES)
        with database.write() as connection:
            events.forget(connection, now=now)
        with database.write() as connection:
            idempotency.forget(connection, now=now)
        implicit.delete_idle(self._parts, now)
        with database.read() as connection:
            known = state_counts.deployment_ids(connection)
        self._parts.recorder.keep_only(known)


def _is_early(now: datetime, due: datetime, every: timedelta) -> bool:
    """Whether it is not time yet. After the clock was set back it is time."""
    return due - every <= now < due
