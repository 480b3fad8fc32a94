"""Follows a job's stream without I/O: opens it, reads it, and reopens it after the last event when it breaks off.

Like the core in `core.py`, this is a generator: it yields steps and entries, and receives answers and blocks.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from tuneship.client.core import HttpAnswer, Pause, backoff, judge
from tuneship.client.sse import EventReader, ServerEvent
from tuneship.contract.declaring.operation import Call
from tuneship.contract.errors import BadResponse, ServiceUnreachable
from tuneship.contract.jobs import get_job_logs
from tuneship.contract.reports.job_reports import JobLogEntry, JobStep

MEDIA = "text/event-stream"
# The service sends something every 15 s; after three times that the connection counts as dead.
SILENCE_S = 45.0
FRAMES: dict[str, type[BaseModel]] = {"log": JobLogEntry, "metrics": JobStep}


@dataclass(frozen=True)
class Open:
    """A step: close an earlier answer, send the call, and keep its answer open. Its result is an `HttpAnswer`."""

    call: Call


@dataclass(frozen=True)
class Read:
    """A step: wait for the next block of the open answer. Its result is a `Block`."""


@dataclass(frozen=True)
class Block:
    """Bytes of the open answer; None at its end, or when the connection broke."""

    content: bytes | None = None


@dataclass(frozen=True)
class Followed:
    """An entry for the caller."""

    entry: Any


Following = Generator[Open | Read | Pause | Followed, HttpAnswer | Block | None, None]


def follow_job(job_id: str, after: str | None, tries: int, draw: Callable[[], float]) -> Following:
    """The job's log lines and training steps until the job has ended.

    `tries` bounds the consecutive failures, as for any call; bytes from the service reset the count. For `draw` see
    `converse`. Raises the service's error or the last failure.
    """
    failures = 0
    while True:
        answer = yield Open(get_job_logs.bind(job_id, after=after, stream=True))
        if not isinstance(answer, HttpAnswer):
            raise TypeError("the result of Open is an HttpAnswer")
        failure, pause = judge(get_job_logs, answer)
        if failure is None:
            reader = reader_of("get_job_logs", answer.response)
            while (content := content_of((yield Read()))) is not None:
                failures = 0
                for event in reader.feed(content):
                    after = event.id or after
                    if event.kind == "done":
                        return
                    # Newer services may send other kinds of events; they are skipped.
                    if event.kind in FRAMES:
                        yield Followed(read_event("get_job_logs", FRAMES, event))
            failure, pause = ServiceUnreachable("get_job_logs: the stream broke off"), 0.0
        failures += 1
        if pause is None or failures >= tries:
            raise failure
        yield Pause(backoff(pause, failures, draw))


def media_of(response: httpx.Response | None) -> str:
    """Media type of an answer without its parameters; empty without one."""
    header = response.headers.get("content-type", "") if response is not None else ""
    return header.partition(";")[0].strip()


def reader_of(name: str, response: httpx.Response | None) -> EventReader:
    """A reader for the events of an answer. Raises `BadResponse` for an answer of another media type."""
    if media_of(response) != MEDIA:
        raise BadResponse(f"{name}: the answer is no stream of events")
    return EventReader()


def content_of(result: HttpAnswer | Block | None) -> bytes | None:
    """Bytes that a `Read` has brought; None at the end of the answer."""
    if not isinstance(result, Block):
        raise TypeError("the result of Read is a Block")
    return result.content


def read_event(name: str, frames: Mapping[str, type[BaseModel]], event: ServerEvent) -> Any:
    """The data of an event as the model of its kind."""
    try:
        return frames[event.kind].model_validate_json(event.data)
    except ValidationError:
        raise BadResponse(f"{name}: a {event.kind} event is not readable") from None
