"""Brings reality in line with the rows: has jobs run, loads and unloads deployments, reverts lapsed leases.

One loop on the service's event loop; database work goes to threads, processes are started on the main thread (their
parent-death signal follows it). Everything it knows can be lost: after a restart the rows and checkpoints suffice.
"""

import asyncio
import logging
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from tuneship.runtime.workers import Runtime
from tuneship.service.context import Parts
from tuneship.service.dataset_processing import DatasetProcessing
from tuneship.service.deployment_keeper import DeploymentKeeper
from tuneship.service.training_keeper import TrainingKeeper
from tuneship.store import (
    deployment_logs,
    endpoint_records,
    events,
    idempotency,
    metric_windows,
    tables,
)

logger = logging.getLogger(__name__)

TICK_S = 0.2
LOGS_KEPT = timedelta(days=30)
MOST_LOG_LINES = 10_000
"""Of one deployment."""
FORGET_EVERY = timedelta(hours=1)
STORE_EVERY = timedelta(milliseconds=800)
"""Of metrics and deployment logs; whoever reads either stores it first, so only a kill can lose as much."""


class Supervisor:
    """The loop over jobs, deployments and leases."""

    def __init__(self, parts: Parts, runtime: Runtime, work: Path, owner: str) -> None:
        """`work`: folder for attempts and checkpoints; `owner`: this process in lease rows."""
        self._parts = parts
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper = DeploymentKeeper(parts)
        self._trainings = TrainingKeeper(parts, runtime, work, owner)
        self._datasets = DatasetProcessing(parts)
        self._forget_at = self._store_at = parts.clock()

    def wake(self) -> None:
        """Look at the rows now; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)
            self._loop.call_soon_threadsafe(self._datasets.wake)

    async def run(self) -> None:
        """Until cancelled; then training processes are ended, to go on from their checkpoint later."""
        self._loop = asyncio.get_running_loop()
        warming = asyncio.create_task(self._keeper.warm())
        processing = asyncio.create_task(self._datasets.run())
        try:
            while True:
                await self._tick()
                self._woken.clear()
                with suppress(TimeoutError):  # `wait_for` of Python 3.11 may swallow a cancellation
                    async with asyncio.timeout(TICK_S):
                        await self._woken.wait()
        finally:
            warming.cancel()
            await self._keeper.stop()
            processing.cancel()
            self._trainings.stop()
            await asyncio.to_thread(self._parts.store_metrics)
            await asyncio.to_thread(self._parts.store_logs)

    async def _tick(self) -> None:
        """Each by itself: metrics that cannot be stored must not keep a lapsed lease or a job waiting."""
        everything_held = True
        for step in (
            partial(asyncio.to_thread, self._revert_lapsed),
            self._keeper.reconcile,
            self._trainings.tick,
            partial(asyncio.to_thread, self._store_recorded),
            partial(asyncio.to_thread, self._forget_old),
        ):
            try:
                await step()
            except Exception:  # the loop must outlive any single failure; the next tick tries again
                logger.exception("supervision failed")
                everything_held = False
        if not everything_held:
            await asyncio.sleep(1)

    def _revert_lapsed(self) -> None:
        now = self._parts.clock()
        with self._parts.database.read() as connection:
            query = sa.select(sa.func.count()).where(tables.endpoints.c.lease_until <= now)
            lapsed = connection.execute(query).scalar_one()
        if lapsed:
            with self._parts.database.write() as connection:
                for endpoint_id in endpoint_records.revert_lapsed(connection, now):
                    logger.warning("lease lapsed, split reverted: %s", endpoint_id)

    def _store_recorded(self) -> None:
        """Not at every tick: each time rewrites a row of a second, a minute and an hour for every series."""
        now = self._parts.clock()
        if now < self._store_at:
            return
        self._store_at = now + STORE_EVERY
        self._parts.store_metrics()
        self._parts.store_logs()

    def _forget_old(self) -> None:
        """Metrics, logs, events and idempotency keys, each beyond the time for which it is kept."""
        now = self._parts.clock()
        if now < self._forget_at:
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
