"""Deletes records at an age, merges old metrics, and sets files aside that have no row."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import is_early
from tuneship.service.background.clock_watch import ClockWatch
from tuneship.service.deployments import implicit
from tuneship.store.cluster import member_ages, member_demand, rate_windows
from tuneship.store.database.database import Database
from tuneship.store.files.blobs import CHECKPOINTS, Blobs
from tuneship.store.files.quarantine import objects_of
from tuneship.store.records import (
    deployment_logs,
    idempotency,
    metric_windows,
    outbox,
    session_records,
)

logger = logging.getLogger(__name__)

LOGS_KEPT_FOR = timedelta(days=30)
# Per deployment.
MAX_LOG_LINES = 10_000
# A console session that has not been used for this long has ended, by any setting.
LONGEST_IDLE = timedelta(hours=1)
FORGET_EVERY = timedelta(hours=1)
FOLD_EVERY = timedelta(minutes=10)
# Files without a row are set aside when they are so old: an upload comes before its row.
LEFT_OVER_AFTER = timedelta(hours=24)


class RetentionKeeper:
    """Does each kind of work when it is due. `forget`, `fold_metrics` and `sweep_files` may be called at every tick."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: Blobs,
        clock: Callable[[], datetime],
        clock_watch: ClockWatch,
    ) -> None:
        """Old records are due at once, files without a row an hour later."""
        self._database, self._blobs = database, blobs
        self._clock, self._clock_watch = clock, clock_watch
        self._threads = Threads("old records", 1)
        self._file_threads = Threads("left-over files", 1)
        self._forget_at = self._fold_at = clock()
        # Not at a start, when an operator may just have put an older database in place.
        self._sweep_at = clock() + FORGET_EVERY

    @property
    def threads(self) -> tuple[Threads, Threads]:
        """All threads that it uses."""
        return (self._threads, self._file_threads)

    async def forget(self) -> None:
        """Delete expired records, once an hour."""
        may_forget, now = self._clock_watch.may_forget(), self._clock()
        if may_forget and not is_early(now, self._forget_at, FORGET_EVERY):
            self._forget_at = now + FORGET_EVERY
            await self._threads.run(self.forget_old, now)

    async def fold_metrics(self) -> None:
        """Merge the stored metrics of the members, hour by hour, some time after each hour's end."""
        now = self._clock()
        if not is_early(now, self._fold_at, FOLD_EVERY):
            self._fold_at = now + FOLD_EVERY
            await self._threads.run(self.fold_hours, now)

    def fold_hours(self, now: datetime) -> None:
        """Merge the stored metrics of all finished hours; without a cluster there is nothing to merge."""
        database = self._database
        with database.read() as connection:
            found = metric_windows.to_fold(connection, now.timestamp())
        for series, hour in found:
            with database.write_beside() as connection:
                metric_windows.fold(connection, series, hour)

    async def sweep_files(self) -> None:
        """Once an hour set the files aside that have no row and are older than a day, e.g. of a killed upload."""
        may_forget, now = self._clock_watch.may_forget(), self._clock()
        if may_forget and not is_early(now, self._sweep_at, FORGET_EVERY):
            self._sweep_at = now + FORGET_EVERY
            await self._file_threads.run(self._set_leftovers_aside, now)

    def _set_leftovers_aside(self, now: datetime) -> None:
        # The files are listed before the rows are read, so a row that came meanwhile keeps its files.
        found = self._blobs.older_than(now - LEFT_OVER_AFTER)
        with self._database.read() as connection:
            unknown = found - objects_of(connection)
        checkpoints = {name for name in unknown if name.startswith(f"{CHECKPOINTS}/")}
        for name in checkpoints:  # of ended jobs, whose keys are destroyed
            self._blobs.delete(name)
        unknown -= checkpoints
        place = self._blobs.set_aside(unknown, now)
        if place is not None:
            text = (
                "objects without a row were moved to %s, and stay there until you remove them: %d"
            )
            logger.warning(text, place, len(unknown))

    def forget_old(self, now: datetime) -> None:
        """Delete records older than their retention time."""
        # A transaction for each kind, so that requests wait for one of them only.
        database, before = self._database, now - LOGS_KEPT_FOR
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
        with database.write_beside() as connection:
            session_records.forget_ended(connection, now, now - LONGEST_IDLE)
        if not database.is_sqlite:
            with database.write_beside() as connection:
                member_demand.forget(connection)
                member_ages.forget(connection)
        implicit.delete_idle(self._database, now)
