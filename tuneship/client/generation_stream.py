"""Reading a streamed generation without I/O: open it like any call, then yield its pieces until its end.

A server that does not stream sends the whole reply, which then is the only piece. Opening is retried like any call; a
stream that has begun is not, since its text would come twice. Like the core in `core.py`, this is a generator.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from tuneship.client.core import HttpAnswer, Pause, backoff, judge
from tuneship.client.following import (
    Followed,
    Following,
    Open,
    Read,
    content_of,
    media_of,
    read_event,
    reader_of,
)
from tuneship.client.sse import EventReader
from tuneship.contract.declaring.operation import Call, Operation
from tuneship.contract.errors import BadResponse, ServiceUnreachable, error_from_answer
from tuneship.contract.generation import BrokenOff, GeneratedText, Generation

FRAMES: dict[str, type[BaseModel]] = {
    "token": GeneratedText,
    "done": Generation,
    "error": BrokenOff,
}


def streaming(call: Call) -> Call:
    """The same request, answered as a stream."""
    return replace(call, body={**(call.body or {}), "stream": True})


def stream_generation(
    operation: Operation[..., Any], call: Call, tries: int, draw: Callable[[], float]
) -> Following:
    """Pieces of text, and the whole reply at the end. Raises like any call, and `ApiError` for an `error` event."""
    name = operation.name
    for attempt in range(1, tries + 1):
        answer = yield Open(call)
        if not isinstance(answer, HttpAnswer):
            raise TypeError("the result of Open is an HttpAnswer")
        failure, pause = judge(operation, answer)
        if failure is None:
            if media_of(answer.response) != "application/json":
                yield from _pieces(name, reader_of(name, answer.response))
                return
            # A server that does not stream sends the whole reply.
            content = b""
            while (block := content_of((yield Read()))) is not None:
                content += block
            try:
                yield Followed(Generation.model_validate_json(content))
            except ValidationError:
                raise BadResponse(f"{name}: the answer is not readable") from None
            return
        if pause is None or attempt == tries:
            raise failure
        yield Pause(backoff(pause, attempt, draw))


def _pieces(name: str, reader: EventReader) -> Following:
    while (content := content_of((yield Read()))) is not None:
        for event in reader.feed(content):
            # Newer services may send other kinds of events; they are skipped.
            if event.kind not in FRAMES:
                continue
            entry = read_event(name, FRAMES, event)
            if isinstance(entry, BrokenOff):
                raise error_from_answer(None, entry.model_dump())
            yield Followed(entry)
            if event.kind == "done":
                return
    raise ServiceUnreachable(f"{name}: the stream broke off")
