"""The retry schedule of deliveries: ten attempts over three days; pure."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from tuneship.contract.declaring.retry_after import seconds_to_wait

# The wait before each attempt; without jitter the last attempt is 75:35:05 after the event.
WAITS = tuple(timedelta(seconds=seconds) for seconds in (0, 5, 300, 1800)) + tuple(
    timedelta(hours=hours) for hours in (2, 5, 10, 14, 20, 24)
)
# Each wait is shorter or longer by up to this fraction, so that receivers that failed together are not called together.
JITTER = 0.1
LONGEST_RETRY_AFTER = timedelta(hours=24)


def next_try(
    attempts: int,
    now: datetime,
    draw: float,
    retry_after: timedelta | None,
    waits: Sequence[timedelta],
) -> datetime | None:
    """The time of the next attempt after `attempts` failed ones; None after the last. `draw`: random, in [0, 1).

    A receiver that asks for a longer wait gets it, up to a day; it cannot ask for a shorter one.
    """
    if attempts >= len(waits):
        return None
    wait = waits[attempts] * (1 - JITTER + 2 * JITTER * draw)
    return now + max(wait, retry_after or timedelta())


def retry_after(value: str | None, now: datetime) -> timedelta | None:
    """Parse a receiver's `Retry-After`; None if it is absent, unreadable or in the past."""
    seconds = seconds_to_wait(value, now)
    if seconds is None or seconds <= 0:
        return None
    return timedelta(seconds=min(seconds, LONGEST_RETRY_AFTER.total_seconds()))
