"""Reconciles: makes reality match the rows of deployments on this machine, and stores what was counted here.

`Supervisor` has the loops of every service; it runs what only one process may do (`leader_work.py`) while its process
leads. The loops run on the service's event loop, so that none waits for another. Blocking work goes to threads that no
request uses; processes are started on the main thread, which their parent-death signal follows. All state here may be
lost: after a restart the rows and checkpoints are enough.
"""

import asyncio
import logging
from collections.abc import Callable

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import RETRY_PAUSE_S, Ticks
from tuneship.service.background.shutdown import end_tasks
from tuneship.service.cluster.leadership import Leadership
from tuneship.service.deployments.deployment_keeper import DeploymentKeeper
from tuneship.service.leader_work import LeaderWork
from tuneship.service.telemetry.record_keeper import RecordKeeper
from tuneship.store.database.database import Database, Fence

logger = logging.getLogger(__name__)

# The timeouts of the phases of the end; together less than `shutdown.TASKS_END_S`.
LOOPS_END_S, THREADS_END_S = 1.0, 3.0


class Supervisor:
    """The background loops of the service."""

    def __init__(
        self,
        *,
        database: Database,
        leadership: Leadership,
        deployments: DeploymentKeeper,
        records: RecordKeeper,
        make_leader_work: Callable[[Database], LeaderWork],
    ) -> None:
        """`make_leader_work`: for one time of leading, on the database behind its fence."""
        self._database = database
        self._leadership = leadership
        self._deployments = deployments
        self.records = records
        self._make_leader_work = make_leader_work
        # Both look at what changes without a write: replicas, and what requests have recorded.
        self._ticks, self._timed = Ticks(idle_tick_s=1.0), Ticks(idle_tick_s=1.0)
        # Its work while this process leads.
        self.leader_work = make_leader_work(database)

    async def run(self) -> None:
        """Run until cancelled; then end the training processes, which resume from their checkpoints later."""
        leading = asyncio.create_task(self._leadership.while_leading(self._lead))
        loops = [
            asyncio.create_task(work)
            for work in (
                self._warm_deployments(),
                self._ticks.repeat(self._deployments.reconcile),
                self._timed.repeat(self.records.tick),
            )
        ]
        try:
            with self._database.listening(self._ticks.wake):
                await asyncio.wait([leading, *loops])
        finally:
            await self._end(leading, loops)

    async def _lead(self, fence: Fence | None) -> None:
        """Do the leader's work until cancelled, with new objects for each term."""
        if fence is not None:
            self.leader_work = self._make_leader_work(self._database.fenced(fence))
        await self.leader_work.run()

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All threads of the loops, without the one for leases."""
        return (self.records.threads, *self.leader_work.threads, *self._deployments.threads)

    async def _warm_deployments(self) -> None:
        """Load the deployments from before the restart again, as soon as the database can be read."""
        while True:
            try:
                await self._deployments.warm()
            except Exception:
                logger.exception("what was deployed could not be loaded again")
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return

    async def _end(self, leading: "asyncio.Task[None]", loops: list["asyncio.Task[None]"]) -> None:
        """End all loops and store the last records. Every wait has a timeout, and hanging work is abandoned."""
        if not leading.cancelling():  # a second time would cut its own end short
            leading.cancel()
        await end_tasks(loops, LOOPS_END_S)
        await self._deployments.stop(LOOPS_END_S)
        own = (self.records.threads, *self._deployments.threads)
        ended = (threads.finish(THREADS_END_S) for threads in own)
        await asyncio.gather(asyncio.wait([leading], timeout=THREADS_END_S), *ended)
        await self.records.store_last()
