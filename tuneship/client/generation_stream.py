"""Reading a generation as it is written, without I/O: open it as any call, then give its pieces until its end.

A server that does not stream answers whole; then the reply is the only piece.

Opening is tried again like any call; a stream that has begun is not, since its text would come a second time. A
generator like the core in `core.py`.
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
    read_event,
    reader_of,
)
from tuneship.client.sse import EventReader, ServerEvent
from tuneship.contract.errors import BadResponse, ServiceUnreachable, error_from_answer
from tuneship.contract.generation import BrokenOff, GeneratedText, Generation
from tuneship.contract.operation import Call, Operation

FRAMES: dict[str, type[BaseModel]] = {
    "token": GeneratedText,
    "done": Generation,
    "error": BrokenOff,
}
# Of what broke off: a status of its own can no longer be sent then.
FAILED_STATUS = 500


def streaming(call: Call) -> Call:
    """The same request, answered as a stream."""
    return replace(call, body={**(call.body or {}), "stream": True})


def stream_generation(
    operation: Operation[..., Any], call: Call, tries: int, draw: Callable[[], float]
) -> Following:
    """Pieces of text, at the end the whole reply. Raises as any call, and `ApiError` for a stream that broke off."""
    name = operation.name
    for attempt in range(1, tries + 1):
        answer = yield Open(call)
        if not isinstance(answer, HttpAnswer):
            raise TypeError("an answer was asked for")
        failure, pause = judge(operation, answer)
        if failure is None:
            if _is_whole(answer):
                yield from _only_piece(name)
            else:
                yield from _pieces(name, reader_of(name, answer.response))
            return
        if pause is None or attempt == tries:
            raise failure
        yield Pause(backoff(pause, attempt, draw))


def _pieces(name: str, reader: EventReader) -> Following:
    while (content := content_of((yield Read()))) is not None:
        for event in reader.feed(content):
            if event.kind in FRAMES:
                yield Followed(_entry(name, event))
            if event.kind == "done":
                return
    raise ServiceUnreachable(f"{name}: the stream broke off")


def _is_whole(answer: HttpAnswer) -> bool:
    media = answer.response.headers.get("content-type", "") if answer.response is not None else ""
    return media.partition(";")[0].strip() == "application/json"


def _only_piece(name: str) -> Following:
    content = b""
    while (block := content_of((yield Read()))) is not None:
        content += block
    try:
        yield Followed(Generation.model_validate_json(content))
    except ValidationError:
        raise BadResponse(f"{name}: the answer is not readable") from None


def _entry(name: str, event: ServerEvent) -> GeneratedText | Generation:
    entry = read_event(name, FRAMES, event)
    if isinstance(entry, BrokenOff):
        raise error_from_answer(FAILED_STATUS, entry.model_dump())
    return entry
