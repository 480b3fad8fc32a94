"""Following a job's stream without I/O: open, read, and open again behind the last event when the line breaks.

A generator like the core in `core.py`: it yields what is to be done and what was found, and is told what came.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from tuneship.client.core import HttpAnswer, Pause, backoff, judge
from tuneship.client.sse import EventReader, ServerEvent
from tuneship.contract.errors import BadResponse, ServiceUnreachable
from tuneship.contract.job_reports import JobLogEntry, JobStep
from tuneship.contract.jobs import get_job_logs
from tuneship.contract.operation import Call

MEDIA = "text/event-stream"
# The service says something every 15 s; after three times that the line is dead.
SILENCE_S = 45.0
FRAMES: dict[str, type[BaseModel]] = {"log": JobLogEntry, "metrics": JobStep}


@dataclass(frozen=True)
class Open:
    """Send the call and keep the answer open; end an earlier one. Told: `HttpAnswer`."""

    call: Call


@dataclass(frozen=True)
class Read:
    """Wait for the next block of the open answer. Told: `Block`."""


@dataclass(frozen=True)
class Block:
    """Bytes of the answer; none at its end or when the line broke."""

    content: bytes | None = None


@dataclass(frozen=True)
class Followed:
    """What the caller is given."""

    entry: Any


Following = Generator[Open | Read | Pause | Followed, HttpAnswer | Block | None, None]


@dataclass
class _Place:
    """How far the stream has come."""

    after: str | None
    failures: int = 0
    has_ended: bool = False


def follow_job(job_id: str, after: str | None, tries: int, draw: Callable[[], float]) -> Following:
    """The job's log lines and training steps until the job has ended.

    `tries` bounds the failures in a row, as of any call; bytes of the service start the count again. `draw` as in
    `converse`. Raises what a refusal or the last failure brought.
    """
    place = _Place(after)
    while True:
        answer = yield Open(get_job_logs.bind(job_id, after=place.after, stream=True))
        if not isinstance(answer, HttpAnswer):
            raise TypeError("an answer was asked for")
        failure, pause = judge(get_job_logs, answer)
        if failure is None:
            yield from _entries(reader_of("get_job_logs", answer.response), place)
            if place.has_ended:
                return
            failure, pause = ServiceUnreachable("get_job_logs: the stream broke off"), 0.0
        place.failures += 1
        if pause is None or place.failures >= tries:
            raise failure
        yield Pause(backoff(pause, place.failures, draw))


def _entries(reader: EventReader, place: _Place) -> Following:
    """What one answer holds, until the job's end or the answer's."""
    while (content := content_of((yield Read()))) is not None:
        place.failures = 0
        for event in reader.feed(content):
            place.after = event.id or place.after
            if event.kind == "done":
                place.has_ended = True
                return
            if event.kind in FRAMES:
                yield Followed(read_event("get_job_logs", FRAMES, event))


def reader_of(name: str, response: httpx.Response | None) -> EventReader:
    """For the events of an answer. Raises `BadResponse` for one of another kind."""
    media = response.headers.get("content-type", "") if response is not None else ""
    if media.partition(";")[0].strip() != MEDIA:
        raise BadResponse(f"{name}: the answer is no stream of events")
    return EventReader()


def content_of(told: HttpAnswer | Block | None) -> bytes | None:
    """What was read; None at the end of the answer."""
    if not isinstance(told, Block):
        raise TypeError("a block was asked for")
    return told.content


def read_event(name: str, frames: Mapping[str, type[BaseModel]], event: ServerEvent) -> Any:
    """The data of an event as the model of its kind."""
    try:
        return frames[event.kind].model_validate_json(event.data)
    except ValidationError:
        raise BadResponse(f"{name}: a {event.kind} event is not readable") from None
