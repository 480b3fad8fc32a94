"""A job's log and metrics as one stream of frames, from any position in it to the job's end.

Log entries are numbered in the order of their commits (a tenant has one writer at a time), steps count up; each step
also has the id of the newest log entry at its time (`log_id`), by which the two are merged. A cursor holds both
positions: the last log entry and the last step that were sent. So a resumed stream reads later entries and higher
steps: it loses none and repeats none, even where a resumed training reports its steps again. A cursor of a page of the
log knows no step: then the steps stored from that entry on are sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from tuneship.contract.jobs import ENDED
from tuneship.contract.reports.job_reports import JobLogEntry, JobStep
from tuneship.host.waiting import wait_for_event
from tuneship.service.answers.streaming import Frame
from tuneship.service.context.context import Context
from tuneship.store.database import rows, tables
from tuneship.store.database.rows import Row
from tuneship.store.records import job_records

# Rows of each kind in one read.
ROWS_AT_ONCE = 500
LOG_BITS = 63


@dataclass(frozen=True)
class StreamPosition:
    """The last log entry and the last step that were sent; no step if the reader has read only pages of the log."""

    log_id: int = 0
    step: int | None = None

    @property
    def number(self) -> int:
        """The position packed into one integer for a cursor; without a step it is the id of the last entry."""
        return (0 if self.step is None else self.step + 1) << LOG_BITS | self.log_id

    @classmethod
    def of(cls, number: int) -> "StreamPosition":
        """Read a position from the integer that `number` returned."""
        step = (number >> LOG_BITS) - 1
        return cls(number & (1 << LOG_BITS) - 1, None if step < 0 else step)


def position_of(context: Context, job_id: str, token: str | None) -> StreamPosition:
    """Read a cursor; without one, start at the beginning. Raises `ValidationFailed`."""
    if token is None:
        return StreamPosition()
    return StreamPosition.of(context.parts.cursors.position(job_id, token))


async def job_frames(
    context: Context, job_id: str, position: StreamPosition, rows_at_once: int = ROWS_AT_ONCE
) -> AsyncGenerator[Sequence[Frame]]:
    """Yield all frames after the position, live, until the job has ended and everything was sent."""
    with context.parts.notifier.listening(job_id) as news:
        while True:
            news.clear()
            read = await asyncio.to_thread(_read_on, context, job_id, position, rows_at_once)
            position = read.position
            if read.frames:
                yield read.frames
            if read.is_last:
                yield [Frame("done", "[DONE]")]
                return
            if not read.has_more:
                await wait_for_event(news, context.parts.timing.stream_poll_s)


@dataclass(frozen=True)
class _StreamRead:
    """Merged frames of one read, and the position after them."""

    frames: Sequence[Frame]
    position: StreamPosition
    # The read was full, so there may be more right behind it.
    has_more: bool
    is_last: bool


def _read_on(context: Context, job_id: str, position: StreamPosition, limit: int) -> _StreamRead:
    # One view of the database: the end of a job is stored together with its last log entry.
    with context.parts.database.read() as connection:
        job = rows.fetch(connection, tables.jobs, job_id, client_id=None)
        logs = job_records.logs_of(connection, job_id, after=position.log_id, limit=limit)
        steps = job_records.steps_after(
            connection, job_id, step=position.step, log_id=position.log_id, limit=limit
        )

    frames: list[Frame] = []
    for row in _merged(logs, steps, limit):
        is_step = "step" in row
        change = {"step": row["step"]} if is_step else {"log_id": row["id"]}
        position = replace(position, **change)
        token = context.parts.cursors.issue(job_id, position.number)
        if is_step:
            frames.append(Frame("metrics", JobStep(**row), token))
        else:
            frames.append(Frame("log", JobLogEntry(**row), token))
    has_more = limit in (len(logs), len(steps))
    has_ended = job is None or job["status"] in ENDED
    return _StreamRead(frames, position, has_more, has_ended and not has_more)


def _merged(logs: Sequence[Row], steps: Sequence[Row], limit: int) -> list[Row]:
    """Merge both in their own order; a step follows the log entry that was the newest when it was stored.

    Rows behind the end of a full read wait for the next read: they would overtake what is not read yet.
    """
    merged = list(
        merge(logs, steps, key=lambda row: (row["log_id"], 1) if "step" in row else (row["id"], 0))
    )
    ends = [merged.index(source[-1]) for source in (logs, steps) if len(source) == limit]
    return merged[: min(ends) + 1] if ends else merged
