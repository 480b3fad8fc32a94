"""Streamed answers: a handler returns a `Stream` of frames.

Knows no HTTP framework and no resource. Frames are put on the wire by `service/http/streams.py`; the users are
`service/jobs/stream.py` and `service/generation/text_stream.py`.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pydantic import BaseModel

from tuneship.contract.errors import ApiError
from tuneship.contract.generation import BrokenOff


@dataclass(frozen=True)
class Frame:
    """One frame of a stream. A text instead of an object is a mark for readers of events, e.g. `[DONE]`."""

    # The kind of the frame; without one, readers of events get only the data.
    event: str
    data: BaseModel | str
    # A reader that was cut off sends this id to resume after the frame.
    id: str | None = None


@dataclass(frozen=True)
class Stream:
    """An answer in frames. The generator runs on the event loop and is closed in any case.

    It yields together all frames that are ready, so that a long log goes out in few pieces. A handler refuses what it
    can before it returns a stream: one that has begun can only end.
    """

    frames: AsyncGenerator[Sequence[Frame]]
    # A draining service lets it finish: it ends by itself, and its reader could not resume elsewhere.
    outlasts_drain: bool = False
    # It goes out as server-sent events, whatever the reader asks for.
    is_events_only: bool = False
    # Turns a frame of the main API into those of the API that was called.
    convert: Callable[[Frame], Sequence[Frame]] = lambda frame: (frame,)

    def broken_off(self, error: ApiError, request_id: str) -> Sequence[Frame]:
        """The last frames of a stream that ends with an error."""
        return self.convert(Frame("error", BrokenOff.model_validate(error.as_json(request_id))))


async def reframed(
    stream: Stream, first: Sequence[Frame], convert: Callable[[Frame], Sequence[Frame]]
) -> Stream:
    """The stream with converted frames, after `first`; only for readers of events."""

    async def frames() -> AsyncGenerator[Sequence[Frame]]:
        async with aclosing(stream.frames) as source:
            yield ()
            yield first
            async for together in source:
                if converted := [one for frame in together for one in convert(frame)]:
                    yield converted

    # A generator closes its source only once it has begun.
    begun = frames()
    await anext(begun)
    return Stream(begun, outlasts_drain=stream.outlasts_drain, is_events_only=True, convert=convert)
