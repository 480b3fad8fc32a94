"""Parsing `Retry-After` (RFC 9110), for the client and for the sender of webhooks."""

import math
from datetime import datetime
from email.utils import parsedate_to_datetime


def seconds_to_wait(value: str | None, now: datetime) -> float | None:
    """Seconds from `now`, negative for a past date; None when absent or unreadable. The caller limits them."""
    # `float` also reads digits of other scripts.
    if not value or not value.isascii():
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            return (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError, OverflowError):  # TypeError: a date without a zone
            return None
    # `float` reads `nan` and `inf`, too; nobody can wait for them.
    return seconds if math.isfinite(seconds) else None
