"""Ends rollout leases that have lapsed, and renews the leases of jobs whose processes run.

It has its own threads and database connections, and goes ahead of all other writers: when a rollout's pipeline is gone,
its traffic is rolled back however busy or stuck everything else is, the event loop included. A tenant whose rows are
held by another writer delays no lease of a job.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from tuneship.service.background.background_retries import BackgroundRetries
from tuneship.store.database.database import Database
from tuneship.store.records import endpoint_records, job_leases
from tuneship.store.records.job_leases import JobLease

logger = logging.getLogger(__name__)

# The longest pause between two looks. Leases are longer, so the lapse of each is known at the look before it.
LOOK_EVERY_S = 1.0
# A third of a job's lease, so that a renewal that fails can be tried again.
RENEW_EVERY = timedelta(seconds=10)


class LeaseKeeper:
    """Ends and renews leases from `start` to `stop`."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Callable[[], datetime],
        held: Callable[[], Sequence[JobLease]],
    ) -> None:
        """`held` returns, on any thread, the leases of this service's running jobs."""
        self._database = database
        self._clock = clock
        self._held = held
        self._renew_at = clock()
        # Endpoints whose lease cannot be ended. That is retried forever: requests follow the fallback
        # in any case.
        self._retries = BackgroundRetries(clock)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        self._stopped.clear()
        for work, name in ((self._end_lapsed, "leases"), (self._renew_held, "leases of jobs")):
            thread = threading.Thread(target=self._repeat, args=(work,), daemon=True, name=name)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the threads. Returns when they have ended or the timeout has passed."""
        self._stopped.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _repeat(self, work: Callable[[datetime], datetime | None]) -> None:
        """Repeat work that returns when it is due again, if that is known."""
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            pause_s = LOOK_EVERY_S
            try:
                due = work(self._clock())
            except Exception:  # the database is away: the next look tries again
                logger.exception("leases could not be ended or renewed")
                continue
            if due is not None:
                left_s = (due - self._clock()).total_seconds()
                pause_s = min(LOOK_EVERY_S, max(0.0, left_s))

    def _end_lapsed(self, now: datetime) -> datetime | None:
        """End the leases that have lapsed; returns when the next one lapses."""
        with self._database.read(first=True) as connection:
            lapsed = endpoint_records.lapsed(connection, now)
            next_lapse = endpoint_records.next_lapse(connection, now)
        self._retries.keep_only(lapsed)
        waiting = self._retries.waiting()
        # The write is urgent and so goes ahead of all others: none is begun for nothing.
        clients = {client for endpoint_id, client in lapsed.items() if endpoint_id not in waiting}
        for client_id in sorted(clients):
            try:
                with self._database.write(client_id, first=True) as connection:
                    ended = endpoint_records.revert_lapsed(connection, client_id, now, waiting)
                for endpoint_id, error in ended.items():
                    if error is None:
                        logger.warning("lease expired, split reverted: %s", endpoint_id)
                    else:
                        self._retries.add(endpoint_id, error)
            except Exception:  # one tenant's rows may be held; the next look tries them again
                logger.exception("expired leases of a tenant could not be ended")
        return next_lapse

    def _renew_held(self, now: datetime) -> None:
        if now < self._renew_at:
            return
        held = self._held()
        if held:
            with self._database.write_beside(first=True) as connection:
                job_leases.renew(connection, held, now)
        self._renew_at = now + RENEW_EVERY
