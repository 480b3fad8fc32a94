"""When an event is tried again: ten tries over three days. Pure."""

from datetime import datetime, timedelta

from tuneship.contract.retry_after import seconds_to_wait

# Before each try; without jitter the last one comes 75:35:05 after the event.
WAITS = tuple(timedelta(seconds=one) for one in (0, 5, 300, 1800)) + tuple(
    timedelta(hours=one) for one in (2, 5, 10, 14, 20, 24)
)
# Each wait is up to so much shorter or longer, so that receivers which failed together are not
# called together.
JITTER = 0.1
LONGEST_RETRY_AFTER = timedelta(hours=24)


def next_try(
    attempts: int, now: datetime, draw: float, retry_after: timedelta | None
) -> datetime | None:
    """When to try again after `attempts` failed ones; None: no more. `draw` is in [0, 1).

    A receiver that asks for more time gets it, up to a day; it cannot ask to be called sooner.
    """
    if attempts >= len(WAITS):
        return None
    wait = WAITS[attempts] * (1 - JITTER + 2 * JITTER * draw)
    return now + max(wait, retry_after or timedelta())


def retry_after(value: str | None, now: datetime) -> timedelta | None:
    """What the receiver asks for; None where that is absent, unreadable or past."""
    seconds = seconds_to_wait(value, now)
    if seconds is None or seconds <= 0:
        return None
    return timedelta(seconds=min(seconds, LONGEST_RETRY_AFTER.total_seconds()))
