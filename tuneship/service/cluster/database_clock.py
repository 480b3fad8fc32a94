"""The clock of a cluster: the database's, carried on by this machine between two readings.

Leases, rate windows and expiries are compared on several machines, whose clocks differ. What this machine's wall clock
says does not matter here, nor does it when somebody sets it.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import sqlalchemy as sa

from tuneship.service.background.clock_watch import awake_s
from tuneship.store.database.database import Database

READ_EVERY_S = 5.0
# A reading that took longer is thrown away: half of that is how far it may be wrong.
SLOW_S = 0.2
# A service without a good reading for this long takes no requests.
STALE_AFTER_S = 30.0
TRIES_AT_START = 20


class DatabaseClock:
    """Returns the database's time. Call it from any thread."""

    def __init__(self, database: Database, elapsed: Callable[[], float] = awake_s) -> None:
        """Read the database's clock for the first time, with any delay if all readings are slow."""
        self._database = database
        self._elapsed = elapsed
        for _ in range(TRIES_AT_START):
            self._last, took_s = self._reading()
            if took_s <= SLOW_S:
                break

    def __call__(self) -> datetime:
        """The present moment."""
        read_at, moment = self._last
        return moment + timedelta(seconds=self._elapsed() - read_at)

    @property
    def is_good(self) -> bool:
        """Whether the last good reading is recent."""
        return self._elapsed() - self._last[0] < STALE_AFTER_S

    def read(self) -> None:
        """Read the database's clock again; a slow reading changes nothing. Raises SQLAlchemy's errors."""
        reading, took_s = self._reading()
        if took_s <= SLOW_S:
            self._last = reading

    def _reading(self) -> tuple[tuple[float, datetime], float]:
        """When it was read by `elapsed` with the database's time then, and how long the round trip took."""
        with self._database.read(first=True) as connection:
            connection.execute(sa.select(1))  # the transaction has begun
            before = self._elapsed()
            moment = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
            after = self._elapsed()
        return ((before + after) / 2, moment), after - before
