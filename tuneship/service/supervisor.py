"""Reconciles: makes reality match the rows of deployments on this machine, and stores what was counted here.

`Supervisor` has the loops of every service; it runs what only one process may do (`leader_work.py`) while its process
leads. The loops run on the service's event loop, so that none waits for another. Blocking work goes to threads that no
request uses; processes are started on the main thread, which their parent-death signal follows. All state here may be
lost: after a restart the rows and checkpoints are enough.
"""

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import RETRY_PAUSE_S, Ticks, is_early
from tuneship.processes.worker_protocol import Runtime
from tuneship.service.background.shutdown import end_tasks
from tuneship.service.background_requests.pace import TakeSpare
from tuneship.service.cluster.leadership import Leadership
from tuneship.service.cluster.shared_replicas import SharedReplicas
from tuneship.service.context.context import Parts
from tuneship.service.deployments.deployment_keeper import DeploymentKeeper
from tuneship.service.leader_work import LeaderWork
from tuneship.store.cluster.member_sessions import ALONE
from tuneship.store.database.database import Fence
from tuneship.store.records import state_counts

logger = logging.getLogger(__name__)

# The interval for metrics and deployment logs. Readers of either store it first, so only a kill can
# lose this much.
STORE_EVERY = timedelta(milliseconds=800)
FORGET_EVERY = timedelta(hours=1)
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
        leadership: Leadership,
    ) -> None:
        """`work`: folder for attempts and checkpoints; `owner`: this process in lease rows.

        `take_spare`: counts a batch's request against its tenant's limit, if there is enough left.
        """
        self._parts = parts
        self._leadership = leadership
        self._made_of = (runtime, work, owner, take_spare)
        self._ticks, self._timed = Ticks(), Ticks()
        self._threads = Threads("records", 1)
        self._deployments = DeploymentKeeper(parts, self._leadership)
        # Its work while this process leads.
        self.leader_work = LeaderWork(parts, *self._made_of)
        self._forget_at = self._store_at = parts.clock()

    def share(self, shared: SharedReplicas) -> None:
        """Use the replicas of the whole cluster; call it before `run`."""
        self._deployments = DeploymentKeeper(self._parts, self._leadership, shared)

    async def run(self) -> None:
        """Run until cancelled; then end the training processes, which resume from their checkpoints later."""
        leading = asyncio.create_task(self._leadership.while_leading(self._lead))
        loops = [
            asyncio.create_task(work)
            for work in (
                self._warm_deployments(),
                self._ticks.repeat(self._deployments.reconcile),
                self._timed.repeat(self.store_records),
            )
        ]
        try:
            with self._parts.database.listening(self._ticks.wake):
                await asyncio.wait([leading, *loops])
        finally:
            await self._end(leading, loops)

    async def _lead(self, fence: Fence | None) -> None:
        """Do the leader's work until cancelled, each time with new objects: nothing stays of an earlier one."""
        if fence is not None:
            parts = replace(self._parts, database=self._parts.database.fenced(fence))
            self.leader_work = LeaderWork(parts, *self._made_of)
        await self.leader_work.run()

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All threads of the loops, without the one for leases."""
        return (self._threads, *self.leader_work.threads, *self._deployments.threads)

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

    async def _end(self, leading: "asyncio.Task[None]", loops: list["asyncio.Task[None]"]) -> None:
        """End all loops and store the last records. Every wait has a timeout: what hangs is left behind."""
        if not leading.cancelling():  # a second time would cut its own end short
            leading.cancel()
        await end_tasks(loops, LOOPS_END_S)
        await self._deployments.stop(LOOPS_END_S)
        ended = (
            threads.finish(THREADS_END_S) for threads in (self._threads, *self._deployments.threads)
        )
        await asyncio.gather(asyncio.wait([leading], timeout=THREADS_END_S), *ended)
        for store in (self._parts.store_metrics, self._parts.store_logs):
            try:
                async with asyncio.timeout(STORE_S):
                    await Threads("last records", 1).run(store)
            except Exception:
                logger.exception("the last metrics or deployment logs could not be stored")

    async def store_records(self) -> None:
        """Store recorded metrics and logs, and forget the counts of deployments that are gone."""
        now = self._parts.clock()
        # Not at every tick: each time rewrites the row of a second, a minute and an hour for every series.
        if not is_early(now, self._store_at, STORE_EVERY):
            self._store_at = now + STORE_EVERY
            await self._threads.run(self._parts.store_metrics)
            await self._threads.run(self._parts.store_logs)
            if self._parts.member_number != ALONE:
                await self._threads.run(self._parts.store_ages)
        if not is_early(now, self._forget_at, FORGET_EVERY):
            self._forget_at = now + FORGET_EVERY
            await self._threads.run(self.forget_counts)

    def forget_counts(self) -> None:
        """Forget what was counted of deployments that are gone."""
        with self._parts.database.read() as connection:
            known = state_counts.deployment_ids(connection)
        self._parts.recorder.keep_only(known)
