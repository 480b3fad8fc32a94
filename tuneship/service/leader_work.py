"""The work that only one process of an installation does: jobs, datasets, batches, evaluations, leases, old records.

It runs in the one service on a database, and in a cluster in the leader (`cluster/leadership.py`), whose database is
fenced. All state here may be lost: after a restart, or on another machine, the rows and checkpoints are enough. Leases
have a thread of their own (`endpoints/lease_keeper.py`).
"""

import asyncio
from collections.abc import Sequence

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import Ticks
from tuneship.service.background.shutdown import end_tasks
from tuneship.service.background_requests.background_keeper import BackgroundKeeper
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.service.endpoints.lease_keeper import LeaseKeeper
from tuneship.service.jobs.training_keeper import TrainingKeeper
from tuneship.service.retention_keeper import RetentionKeeper
from tuneship.store.database.database import Database
from tuneship.store.database.tables import BatchRow, EvaluationRow

# The timeouts of the phases of the end; together less than `shutdown.TASKS_END_S`.
LOOPS_END_S, THREADS_END_S = 1.0, 2.0


class LeaderWork:
    """The background loops of the one process that leads."""

    def __init__(  # noqa: PLR0913 - all that it uses, by name
        self,
        *,
        database: Database,
        trainings: TrainingKeeper,
        datasets: DatasetProcessing,
        batches: BackgroundKeeper[BatchRow],
        evaluations: BackgroundKeeper[EvaluationRow],
        leases: LeaseKeeper,
        retention: RetentionKeeper,
        training_threads: Sequence[Threads],
    ) -> None:
        """`training_threads`: all that trainings use."""
        self._database = database
        self._trainings = trainings
        self._datasets = datasets
        self.batches = batches
        self.evaluations = evaluations
        self._leases = leases
        self.retention = retention
        self._training_threads = training_threads
        self._ticks, self._timed = Ticks(), Ticks()

    async def run(self) -> None:
        """Run until cancelled; then end the training processes, which resume from their checkpoints later."""
        self._leases.start()
        loops = [
            asyncio.create_task(work)
            for work in (
                self._datasets.run(),
                self.batches.run(),
                self.evaluations.run(),
                self._ticks.repeat(self._trainings.tick),
                self._timed.repeat(self.retention.forget),
                self._timed.repeat(self.retention.fold_metrics),
                self._timed.repeat(self.retention.sweep_files),
            )
        ]
        try:
            with self._database.listening(self._ticks.wake):
                await asyncio.wait(loops)
        finally:
            await self._end(loops)

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All threads of the loops, without the one for leases."""
        return (
            *self.retention.threads,
            *self._training_threads,
            self._datasets.threads,
            self.batches.threads,
            self.evaluations.threads,
        )

    async def _end(self, loops: list["asyncio.Task[None]"]) -> None:
        """End all loops. Every wait has a timeout, and hanging work is abandoned."""
        await self._trainings.stop()
        try:
            await end_tasks(loops, LOOPS_END_S)
            await asyncio.gather(*(threads.finish(THREADS_END_S) for threads in self.threads))
        finally:
            self._leases.stop(LOOPS_END_S)
        await self._trainings.release()
