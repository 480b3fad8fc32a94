"""`Retry-After` as RFC 9110 writes it, for whoever reads an answer: the client, and the sender of webhooks."""

import math
from datetime import datetime
from email.utils import parsedate_to_datetime


def seconds_to_wait(value: str | None, now: datetime) -> float | None:
    """From `now` on, below 0 for a date in the past; None where absent or unreadable. The caller has the limits."""
    if not value or not value.isascii():
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            return (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError, OverflowError):  # TypeError: a date without a zone
            return None
    return seconds if math.isfinite(seconds) else None
