"""Notices a wall clock that jumps, so that a wrong clock deletes nothing.

Metrics, logs, events and idempotency keys are deleted at an age by the wall clock. After a jump ahead nothing is
deleted for a day of real time, in which an operator can correct the clock. Nor is the new time recorded as the newest
known one, so that a service on the corrected clock starts as usual.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tuneship.store.database.database import Database
from tuneship.store.installation import installation

# More than NTP corrects in one step.
JUMP = timedelta(minutes=5)
# A machine that was off for longer cannot be distinguished from one whose clock is ahead.
LONG_AWAY = timedelta(days=1)
# Seconds of real time for which nothing is deleted after a jump ahead.
HOLD_S = 86_400.0

logger = logging.getLogger(__name__)


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def awake_s() -> float:
    """Seconds of real time, including the time of a suspended machine if the system counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ClockWatch:
    """Compares the wall clock with the time that has really passed."""

    def __init__(
        self,
        clock: Callable[[], datetime] = utc_now,
        elapsed: Callable[[], float] = awake_s,
        last_seen: datetime | None = None,
    ) -> None:
        """`last_seen`: the newest time that an earlier run has recorded."""
        self._clock = clock
        self._elapsed = elapsed
        self._seen = (clock(), elapsed())
        self._held_until = float("-inf")
        if last_seen is not None and self._seen[0] - last_seen > LONG_AWAY:
            self._hold("the clock is %s ahead of the last run of the service", last_seen)

    def may_forget(self) -> bool:
        """Whether rows may be deleted by their age on the clock."""
        (before, passed_before), self._seen = self._seen, (self._clock(), self._elapsed())
        now, passed = self._seen
        expected = before + timedelta(seconds=passed - passed_before)
        if now - expected > JUMP:
            self._hold("the clock has jumped ahead by %s", expected)
        elif expected - now > JUMP:
            logger.warning("the clock has jumped back by %s", expected - now)
        return passed >= self._held_until

    def _hold(self, what: str, expected: datetime) -> None:
        now, passed = self._seen
        self._held_until = passed + HOLD_S
        text = f"{what}: nothing is deleted by age for a day; set the clock if it is wrong"
        logger.warning(text, now - expected)

    def note_time(self, database: Database) -> None:
        """Record the present time for the next start, unless it is in doubt."""
        if self.may_forget():
            with database.write_beside() as connection:
                installation.note_time(connection, self._clock())
