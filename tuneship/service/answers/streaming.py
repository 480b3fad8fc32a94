"""Streamed answers: a handler returns a `Stream` of frames, and waits for news of a resource at a `Notifier`.

Knows no HTTP framework and no resource. Frames are put on the wire by `service/http/streams.py`; the users are
`service/jobs/stream.py` and `service/generation/text_stream.py`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from pydantic import BaseModel

from tuneship.contract.errors import ApiError
from tuneship.contract.generation import BrokenOff


@dataclass(frozen=True)
class Frame:
    """One piece of a stream. Text instead of an object is a mark for readers of events, e.g. `[DONE]`."""

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
    """The stream with other frames: `first`, then what `convert` makes of each; only for readers of events."""

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


class Notifier:
    """Wakes readers that wait for news of a resource. Only a hint: they read the rows, and poll in any case."""

    def __init__(self) -> None:
        """Start without listeners."""
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def notify(self, resource_id: str) -> None:
        """Wake the listeners of a resource. Called after a commit, from any thread."""
        self.wake(resource_id)

    def wake(self, resource_id: str) -> None:
        """Wake those who listen in this process."""
        with self._lock:
            woken = list(self._waiting.get(resource_id, ()))
        for loop, event in woken:
            loop.call_soon_threadsafe(event.set)

    def wake_all(self) -> None:
        """Wake everybody who listens, because it is not known what is new."""
        for resource_id in list(self._waiting):
            self.wake(resource_id)

    @contextmanager
    def listening(self, resource_id: str) -> Generator[asyncio.Event]:
        """An event that every notification sets. Clear it before reading the rows, so that no news is missed."""
        event = asyncio.Event()
        waiting = (asyncio.get_running_loop(), event)
        with self._lock:
            self._waiting.setdefault(resource_id, set()).add(waiting)
        try:
            yield event
        finally:
            with self._lock:
                self._waiting[resource_id].discard(waiting)
                if not self._waiting[resource_id]:
                    del self._waiting[resource_id]


class SharedNotifier(Notifier):
    """The notifier of a member of a cluster, which also notifies the others."""

    def __init__(self, publish: Callable[[str], None]) -> None:
        """`publish` passes the id of a resource to the other members."""
        super().__init__()
        self._publish = publish

    def notify(self, resource_id: str) -> None:
        """Wake the listeners of a resource, here and at the other members."""
        self.wake(resource_id)
        self._publish(resource_id)
