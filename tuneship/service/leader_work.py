"""The work that only one process of an installation does: jobs, datasets, batches, lapsed leases, old records.

It runs in the one service on a database, and in a cluster in the leader (`cluster/leadership.py`), whose database is
fenced. All state here may be lost: after a restart, or on another machine, the rows and checkpoints are enough. Leases
have a thread of their own (`endpoints/lease_keeper.py`).
"""

import asyncio
import logging
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import Ticks, is_early
from tuneship.processes.worker_protocol import Runtime
from tuneship.service.background.shutdown import end_tasks
from tuneship.service.background_requests.pace import TakeSpare
from tuneship.service.batches.keeper import BatchKeeper
from tuneship.service.context.context import Parts
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.service.deployments import implicit
from tuneship.service.endpoints.lease_keeper import LeaseKeeper
from tuneship.service.jobs.agent_launcher import AgentTrainingLauncher
from tuneship.service.jobs.launcher import TrainingLauncher
from tuneship.service.jobs.local_launcher import LocalTrainingLauncher
from tuneship.service.jobs.training_keeper import TrainingKeeper
from tuneship.service.jobs.work_folders import WorkFolders
from tuneship.store.cluster import member_ages, member_demand, rate_windows
from tuneship.store.cluster.leader_lease import LeadershipLost
from tuneship.store.files.blobs import CHECKPOINTS
from tuneship.store.files.quarantine import objects_of
from tuneship.store.records import deployment_logs, idempotency, job_leases, metric_windows, outbox

logger = logging.getLogger(__name__)

LOGS_KEPT_FOR = timedelta(days=30)
# Per deployment.
MAX_LOG_LINES = 10_000
FORGET_EVERY = timedelta(hours=1)
FOLD_EVERY = timedelta(minutes=10)
# Files without a row are set aside when they are so old: an upload comes before its row.
LEFT_OVER_AFTER = timedelta(hours=24)
# The timeouts of the phases of the end; together less than `shutdown.TASKS_END_S`.
LOOPS_END_S, THREADS_END_S, STORE_S = 1.0, 2.0, 2.0


class LeaderWork:
    """The background loops of the one process that leads."""

    def __init__(
        self, parts: Parts, runtime: Runtime, work: Path, owner: str, take_spare: TakeSpare
    ) -> None:
        """See `Supervisor`, which runs it."""
        self._parts = parts
        self._ticks, self._timed = Ticks(), Ticks()
        self._threads = Threads("old records", 1)
        self._file_threads = Threads("left-over files", 1)
        training_threads = Threads("training", 4)
        self._upload_threads = Threads("checkpoints", 2)
        self._lease_threads = Threads("leases of trainings", 1)
        agents = parts.training_agents
        is_portable = parts.blobs.is_remote or agents is not None
        folders = WorkFolders(
            parts, work, training_threads, self._upload_threads, is_portable=is_portable
        )
        launcher: TrainingLauncher
        if agents is None:
            launcher = LocalTrainingLauncher(parts, runtime, folders)
        else:
            launcher = AgentTrainingLauncher(parts, agents, folders, self._lease_threads)
        self._trainings = TrainingKeeper(parts, launcher, owner, training_threads)
        self._datasets = DatasetProcessing(parts)
        self.batches = BatchKeeper(parts, take_spare)
        self._leases = LeaseKeeper(parts, self._trainings.held)
        self._forget_at = self._fold_at = parts.clock()
        # Not at a start, when an operator may just have put an older database in place.
        self._sweep_at = parts.clock() + FORGET_EVERY

    async def run(self) -> None:
        """Run until cancelled; then end the training processes, which resume from their checkpoints later."""
        self._leases.start()
        loops = [
            asyncio.create_task(work)
            for work in (
                self._datasets.run(),
                self.batches.run(),
                self._ticks.repeat(self._trainings.tick),
                self._timed.repeat(self.forget),
                self._timed.repeat(self.fold_metrics),
                self._timed.repeat(self.sweep_files),
            )
        ]
        try:
            with self._parts.database.listening(self._ticks.wake):
                await asyncio.wait(loops)
        finally:
            await self._end(loops)

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All threads of the loops, without the one for leases."""
        return (
            self._threads,
            self._file_threads,
            self._upload_threads,
            self._lease_threads,
            self._trainings.threads,
            self._datasets.threads,
            self.batches.threads,
        )

    async def _end(self, loops: list["asyncio.Task[None]"]) -> None:
        """End all loops. Every wait has a timeout: what hangs is left behind."""
        await self._trainings.stop()
        try:
            await end_tasks(loops, LOOPS_END_S)
            await asyncio.gather(*(threads.finish(THREADS_END_S) for threads in self.threads))
        finally:
            self._leases.stop(LOOPS_END_S)
        await self._release_jobs()

    async def _release_jobs(self) -> None:
        """Let another process claim the jobs that were worked on here, whose processes are gone."""
        held = self._trainings.given_up()
        if not held:
            return

        def release() -> None:
            with self._parts.database.write_beside() as connection:
                job_leases.release(connection, held, self._parts.clock())

        try:
            async with asyncio.timeout(STORE_S):
                await Threads("job leases", 1).run(release)
        except (LeadershipLost, SQLAlchemyError, TimeoutError) as error:  # they lapse in any case
            logger.warning("leases of jobs were not given back: %s", type(error).__name__)

    async def forget(self) -> None:
        """Once an hour delete records beyond the time for which they are kept."""
        may_forget, now = self._parts.clock_watch.may_forget(), self._parts.clock()
        if may_forget and not is_early(now, self._forget_at, FORGET_EVERY):
            self._forget_at = now + FORGET_EVERY
            await self._threads.run(self.forget_old, now)

    async def fold_metrics(self) -> None:
        """Merge the stored metrics of the members, hour by hour, some time after each hour's end."""
        now = self._parts.clock()
        if not is_early(now, self._fold_at, FOLD_EVERY):
            self._fold_at = now + FOLD_EVERY
            await self._threads.run(self.fold_hours, now)

    def fold_hours(self, now: datetime) -> None:
        """Merge the stored metrics of all hours that are over; without a cluster there are none."""
        database = self._parts.database
        with database.read() as connection:
            found = metric_windows.to_fold(connection, now.timestamp())
        for series, hour in found:
            with database.write_beside() as connection:
                metric_windows.fold(connection, series, hour)

    async def sweep_files(self) -> None:
        """Once an hour set the files aside that have no row and are older than a day, e.g. of a killed upload."""
        may_forget, now = self._parts.clock_watch.may_forget(), self._parts.clock()
        if may_forget and not is_early(now, self._sweep_at, FORGET_EVERY):
            self._sweep_at = now + FORGET_EVERY
            await self._file_threads.run(self._set_leftovers_aside, now)

    def _set_leftovers_aside(self, now: datetime) -> None:
        # The files are listed before the rows are read, so a row that came meanwhile keeps its files.
        found = self._parts.blobs.older_than(now - LEFT_OVER_AFTER)
        with self._parts.database.read() as connection:
            unknown = found - objects_of(connection)
        checkpoints = {name for name in unknown if name.startswith(f"{CHECKPOINTS}/")}
        for name in checkpoints:  # of ended jobs, whose keys are destroyed
            self._parts.blobs.delete(name)
        unknown -= checkpoints
        place = self._parts.blobs.set_aside(unknown, now)
        if place is not None:
            text = "%d objects without a row were moved to %s, and stay there until you remove them"
            logger.warning(text, len(unknown), place)

    def forget_old(self, now: datetime) -> None:
        """Delete records beyond the time for which they are kept."""
        # A transaction for each kind, so that requests wait for one of them only.
        database, before = self._parts.database, now - LOGS_KEPT_FOR
        with database.write_beside() as connection:
            metric_windows.forget(connection, now=now.timestamp())
        with database.write_beside() as connection:
            deployment_logs.forget(connection, before=before, most=MAX_LOG_LINES)
        # Alone: a tenant could queue the delivery of an event again while it is deleted.
        with database.write() as connection:
            outbox.forget(connection, now=now)
        with database.write_beside() as connection:
            idempotency.forget(connection, now=now)
        with database.write_beside() as connection:
            rate_windows.forget(connection, now.timestamp())
        if not database.is_sqlite:
            with database.write_beside() as connection:
                member_demand.forget(connection)
                member_ages.forget(connection)
        implicit.delete_idle(self._parts, now)
