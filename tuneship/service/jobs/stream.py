"""A job's log and metrics as one stream of frames, from any place in it to the job's end.

Logs are numbered in the order of their commits (a database has one writer at a time), steps count up; each step also
knows the newest log entry of its time (`log_id`), by which the two are merged. A cursor holds both places: the last
log entry and the last step that were sent. So a resumed stream asks for later entries and for higher steps: it loses
none and doubles none, even where a resumed training reports its steps again. A cursor of a page of the log knows no
step: then the steps stored from that entry on are sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from tuneship.contract.jobs import ENDED, JobLogEntry, JobStep
from tuneship.host.waiting import wait_for_event
from tuneship.service.common.streaming import Frame
from tuneship.service.context.context import Parts
from tuneship.store import job_records, tables
from tuneship.store import queries as rows
from tuneship.store.queries import Row

# Rows of each kind in one reading.
AT_ONCE = 500
# In case a notification was missed; one comes within 0.3 s of a line of the training process.
LOOK_EVERY_S = 2.0
LOG_BITS = 63


@dataclass(frozen=True)
class StreamPosition:
    """Behind which log entry and which step a reader stands; no step: it has read only pages of the log."""

    log_id: int = 0
    step: int | None = None

    @property
    def number(self) -> int:
        """For a cursor; that of a page is the plain number of its last entry."""
        return (0 if self.step is None else self.step + 1) << LOG_BITS | self.log_id

    @classmethod
    def of(cls, number: int) -> "StreamPosition":
        """The inverse of `number`."""
        step = (number >> LOG_BITS) - 1
        return cls(number & (1 << LOG_BITS) - 1, None if step < 0 else step)


def place_of(parts: Parts, job_id: str, token: str | None) -> StreamPosition:
    """Where a token points; without one, the beginning. Raises `ValidationRefused`."""
    return (
        StreamPosition()
        if token is None
        else StreamPosition.of(parts.cursors.position(job_id, token))
    )


async def job_frames(
    parts: Parts, job_id: str, place: StreamPosition
) -> AsyncGenerator[Sequence[Frame]]:
    """Everything behind `place`, live, until the job has ended and all is told. Between looks it only waits."""
    with parts.notifier.listening(job_id) as news:
        while True:
            news.clear()
            look = await asyncio.to_thread(_look, parts, job_id, place)
            place = look.place
            if look.frames:
                yield look.frames
            if look.is_last:
                yield [Frame("done", "[DONE]")]
                return
            if not look.has_more:
                await wait_for_event(news, LOOK_EVERY_S)


@dataclass(frozen=True)
class _Look:
    """What one reading brought, merged, and the place behind it."""

    frames: Sequence[Frame]
    place: StreamPosition
    has_more: bool
    """A reading was full: there may be more right behind it."""
    is_last: bool


def _look(parts: Parts, job_id: str, place: StreamPosition) -> _Look:
    """In one view of the database: an end is stored together with its last log entry."""
    with parts.database.read() as connection:
        job = rows.fetch(connection, tables.jobs, job_id, client_id=None)
        logs = job_records.logs_of(connection, job_id, after=place.log_id, limit=AT_ONCE)
        steps = job_records.steps_behind(
            connection, job_id, step=place.step, log_id=place.log_id, limit=AT_ONCE
        )
    frames: list[Frame] = []
    for row in _merged(logs, steps):
        place = _behind(place, row)
        frames.append(_frame(parts, job_id, place, row))
    has_more = AT_ONCE in (len(logs), len(steps))
    has_ended = job is None or job["status"] in ENDED
    return _Look(frames, place, has_more, has_ended and not has_more)


def _merged(logs: Sequence[Row], steps: Sequence[Row]) -> list[Row]:
    """Both in their own order; a step comes after the entry that was the newest when it was stored.

    What lies behind the end of a full reading waits for the next one: it would overtake what is not read yet.
    """
    found = list(merge(logs, steps, key=_order))
    ends = [found.index(source[-1]) for source in (logs, steps) if len(source) == AT_ONCE]
    return found[: min(ends) + 1] if ends else found


def _order(row: Row) -> tuple[int, int]:
    return (row["log_id"], 1) if "step" in row else (row["id"], 0)


def _behind(place: StreamPosition, row: Row) -> StreamPosition:
    if "step" in row:
        return replace(place, step=row["step"])
    return replace(place, log_id=row["id"])


def _frame(parts: Parts, job_id: str, place: StreamPosition, row: Row) -> Frame:
    token = parts.cursors.issue(job_id, place.number)
    if "step" in row:
        return Frame("metrics", JobStep(**row), token)
    return Frame("log", JobLogEntry(**row), token)
