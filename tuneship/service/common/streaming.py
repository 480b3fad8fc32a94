"""Answers that go on: a handler returns a `Stream` of frames, and whoever waits for news waits at a `Bell`.

Knows no HTTP framework and no resource. How frames are put on the wire is `service/http/streams.py`; the first user
is `service/job_stream.py`, the second `service/generation_stream.py`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True)
class Frame:
    """One piece of a stream. Text instead of an object is a mark for readers of events, e.g. `[DONE]`."""

    event: str
    data: BaseModel | str
    id: str | None = None
    """Where a reader that was cut off goes on."""


@dataclass(frozen=True)
class Stream:
    """What a handler answers instead of one object. The generator runs on the event loop and is closed in any case.

    It gives together what is there at once: a long log goes out in few pieces. Everything that can be refused is
    refused before a handler returns it: a stream that has begun can only end.
    """

    frames: AsyncGenerator[Sequence[Frame]]
    outlasts_drain: bool = False
    """It ends by itself, and its reader could not go on elsewhere: a service that goes away lets it finish."""


class Bell:
    """Wakes those who wait for news of a resource. Only a hint: they look at the rows, and also without it."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def ring(self, resource_id: str) -> None:
        """Say, after a commit, that there is something new; from any thread."""
        with self._lock:
            woken = list(self._waiting.get(resource_id, ()))
        for loop, event in woken:
            loop.call_soon_threadsafe(event.set)

    @contextmanager
    def listening(self, resource_id: str) -> Generator[asyncio.Event]:
        """An event that every ring sets. Clear it before looking, so that no news falls in between."""
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
