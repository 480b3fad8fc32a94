"""Stores facts that were counted in memory: metrics, lines of deployments' logs, ages of requests in flight.

Readers of metrics and logs store them first, so only a kill can lose what came since the keeper's last time.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import is_early
from tuneship.metrics.recorder import Recorder, WindowKey
from tuneship.metrics.windows import MetricWindow
from tuneship.service.telemetry.in_flight import InFlightGenerations
from tuneship.service.telemetry.log_recorder import LogRecorder
from tuneship.store.cluster import member_ages
from tuneship.store.cluster.member_sessions import ALONE
from tuneship.store.database.database import Database
from tuneship.store.records import deployment_logs, metric_windows, state_counts

logger = logging.getLogger(__name__)

STORE_EVERY = timedelta(milliseconds=800)
FORGET_EVERY = timedelta(hours=1)
# The timeouts of the end; together less than `shutdown.TASKS_END_S`.
STORE_S = 2.0


class RecordKeeper:
    """Stores records while the service runs, and once more at its end."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Callable[[], datetime],
        recorder: Recorder,
        log: LogRecorder,
        in_flight: InFlightGenerations,
        member_number: int,
    ) -> None:
        """`member_number`: of this process among the members of a cluster."""
        self._database = database
        self._clock = clock
        self._recorder = recorder
        self._log = log
        self._in_flight = in_flight
        self._member_number = member_number
        self._forget_at = self._store_at = clock()
        self.threads = Threads("records", 1)

    async def tick(self) -> None:
        """Store recorded metrics and logs, and forget the counts of removed deployments."""
        now = self._clock()
        # Not at every tick: each time rewrites the row of a second, a minute and an hour for every series.
        if not is_early(now, self._store_at, STORE_EVERY):
            self._store_at = now + STORE_EVERY
            # An idle service starts no thread for it.
            is_idle = self._recorder.is_empty and self._log.is_empty
            if self._member_number != ALONE or not is_idle:
                await self.threads.run(self._store)
        if not is_early(now, self._forget_at, FORGET_EVERY):
            self._forget_at = now + FORGET_EVERY
            await self.threads.run(self.forget_counts)

    async def store_last(self) -> None:
        """Store the facts since the last tick. Every wait has a timeout, and hanging work is abandoned."""
        for store in (self.store_metrics, self.store_logs):
            try:
                async with asyncio.timeout(STORE_S):
                    await Threads("last records", 1).run(store)
            except Exception:
                logger.exception("the last metrics or deployment logs could not be stored")

    def _store(self) -> None:
        self.store_metrics()
        self.store_logs()
        if self._member_number != ALONE:
            self._store_ages()

    def store_metrics(self) -> None:
        """Store the recorded metrics."""
        store_metrics(self._recorder, self._database, self._clock, self._member_number)

    def store_logs(self) -> None:
        """Store the lines of deployments' logs."""
        store_logs(self._log, self._database, self._clock)

    def _store_ages(self) -> None:
        """Let the other members of a cluster know how old this one's requests in flight are."""
        with self._database.write_beside() as connection:
            member_ages.write(connection, self._member_number, self._in_flight.all_ages())

    def forget_counts(self) -> None:
        """Forget the counts of removed deployments."""
        with self._database.read() as connection:
            known = state_counts.deployment_ids(connection)
        self._recorder.keep_only(known)


def store_metrics(
    recorder: Recorder, database: Database, clock: Callable[[], datetime], member_number: int
) -> None:
    """Write the recorder's windows; on a failure they are kept for the next time."""

    def store(windows: Mapping[WindowKey, MetricWindow]) -> None:
        with database.write_beside() as connection:
            metric_windows.store(connection, windows, clock().timestamp(), member_number)

    recorder.hand_over(store)


def store_logs(log: LogRecorder, database: Database, clock: Callable[[], datetime]) -> None:
    """Write the buffered lines of deployments' logs; on a failure they are kept for the next time."""

    def store(entries: Sequence[deployment_logs.LogEntry]) -> None:
        with database.write_beside() as connection:
            deployment_logs.add(connection, *entries)

    log.hand_over(store, clock())
