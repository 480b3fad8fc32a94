"""Numbers, times and states in words, as every page writes them. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tuneship.contract.common import count
from tuneship.contract.declaring.scopes import in_short
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.jobs import JobStatus

MISSING = "no data"


@dataclass(frozen=True)
class StateLook:
    """How a state looks: a glyph of `macros.html`, a word, and a class that gives it a colour."""

    glyph: str
    word: str
    kind: str


_WAITS, _WORKS = ("next", "open"), ("now", "run")
_ASKS = ("now", "ask")
_GOOD, _BAD, _OVER = ("proven", "proven"), ("harm", "harm"), ("hold", "open")


def _look(of: tuple[str, str], word: str) -> StateLook:
    return StateLook(of[0], word, of[1])


# Every state that a page shows, by its name in the API.
STATES: dict[str, StateLook] = {
    JobStatus.QUEUED: _look(_WAITS, "queued"),
    JobStatus.RUNNING: _look(_WORKS, "running"),
    JobStatus.CANCELLING: _look(_WORKS, "cancelling"),
    JobStatus.COMPLETED: _look(_GOOD, "completed"),
    JobStatus.FAILED: _look(_BAD, "failed"),
    JobStatus.CANCELLED: _look(_OVER, "cancelled"),
    DeploymentStatus.CREATING: _look(_WORKS, "creating"),
    DeploymentStatus.UPDATING: _look(_WORKS, "updating"),
    DeploymentStatus.DELETING: _look(_WORKS, "deleting"),
    DeploymentStatus.DELETED: _look(_OVER, "deleted"),
    # A job that runs works, and a deployment that runs is as it should be.
    "serves": _look(_GOOD, "running"),
    "active": _look(_GOOD, "active"),
    "inactive": _look(_BAD, "inactive"),
    "uploaded": _look(_WAITS, "uploaded"),
    "processing": _look(_WORKS, "processing"),
    "processed": _look(_GOOD, "processed"),
    "pending": _look(_WAITS, "pending"),
    "delivered": _look(_GOOD, "delivered"),
    "dead": _look(_BAD, "given up"),
    "in force": _look(_GOOD, "in force"),
    "expired": _look(_OVER, "expired"),
    "revoked": _look(_OVER, "revoked"),
    "not enforced": _look(_BAD, "not enforced"),
    "pass": _look(_GOOD, "pass"),
    "reject": _look(_BAD, "reject"),
    "hold": _look(_OVER, "hold"),
    "waiting": _look(_ASKS, "waiting for a person"),
    "paused": _look(_OVER, "paused"),
    "ended": _look(_OVER, "ended"),
    "promoted": _look(_GOOD, "promoted"),
    "rolled_back": _look(_BAD, "rolled back"),
    "rejected": _look(_BAD, "rejected"),
    "aborted": _look(_OVER, "stopped"),
    "rollback_incomplete": _look(_BAD, "rollback incomplete"),
    # Gates of a rollout.
    "proven": _look(_GOOD, "proven"),
    "open": _look(("open", "open"), "not proven yet"),
    "harm": _look(_BAD, "harm shown"),
    "hold_gate": _look(_OVER, "worse so far"),
    "not_evaluated": _look(_WAITS, "no limits set"),
    "not_available": _look(_WAITS, "not counted"),
    "disabled": _look(_WAITS, "switched off"),
}


def number(value: float | None, digits: int = 0) -> str:
    """A number with commas between thousands."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one as percent."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def clock(moment: datetime | None) -> str:
    """The time of the day in UTC."""
    return MISSING if moment is None else moment.astimezone(UTC).strftime("%H:%M:%S")


def day(moment: datetime | None) -> str:
    """Date and time in UTC."""
    return MISSING if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def duration(span: timedelta | float | None) -> str:
    """A length of time in its one or two largest units."""
    if span is None:
        return MISSING
    seconds = int(span.total_seconds() if isinstance(span, timedelta) else span)
    if seconds < 60:
        return f"{max(0, seconds)} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    if seconds < 86400:
        hours, rest = divmod(seconds, 3600)
        return f"{hours} h {rest // 60} min" if rest >= 60 else f"{hours} h"
    days, rest = divmod(seconds, 86400)
    return f"{days} d {rest // 3600} h" if rest >= 3600 else f"{days} d"


def short_id(identifier: str) -> str:
    """An id with its middle left out; the whole one belongs in the title."""
    return identifier if len(identifier) <= 16 else f"{identifier[:9]}…{identifier[-4:]}"


# What templates write as `{{ value | day }}`.
FILTERS = (clock, count, day, duration, in_short, number, percent, short_id)
