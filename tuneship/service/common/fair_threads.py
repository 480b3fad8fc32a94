"""The threads in which requests work, given out by turns: no tenant can have all of them, and no long work takes those
of the short one. Knows no request; the boundary says whose work it is.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

R = TypeVar("R")


class FairThreads:
    """A few threads. While work waits for one, the tenants take turns, however much each of them has waiting.

    Used by one event loop.
    """

    def __init__(self, name: str, threads: int, each: int) -> None:
        """`each`: threads that one tenant may have at the same time; `name` is what the threads are called."""
        self.threads = threads
        self._each = each
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, f"tuneship-{name}")

    @property
    def is_idle(self) -> bool:
        """Nothing runs. Work that nobody waits for any more goes on to its end all the same."""
        return not self._running

    def dismiss(self) -> None:
        """Let the idle threads end, and take no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, owner: str, work: Callable[..., R], *arguments: Any) -> R:
        """Do `work` in a thread when it is the owner's turn."""
        await self._enter(owner)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def ended(done: "Future[R]") -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for a thread any more
                loop.call_soon_threadsafe(self._end, owner, done, answer)

        self._pool.submit(work, *arguments).add_done_callback(ended)
        return await answer

    async def _enter(self, owner: str) -> None:
        if self._is_free(owner):
            self._running[owner] += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given a thread in the same moment
                self._leave(owner)
            else:
                self._forget(owner, place)
            raise

    def _is_free(self, owner: str) -> bool:
        """Nobody waits for a thread that could have one: so there is no turn to be respected."""
        return self._running.total() < self.threads and self._running[owner] < self._each

    def _forget(self, owner: str, place: "asyncio.Future[None]") -> None:
        queue = self._waiting[owner]
        queue.remove(place)
        if not queue:
            del self._waiting[owner]

    def _end(self, owner: str, done: "Future[R]", answer: "asyncio.Future[R]") -> None:
        self._leave(owner)
        if answer.done():  # the request was cancelled
            return
        if (error := done.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    def _leave(self, owner: str) -> None:
        """Give the thread to the next tenant that may have one more."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        following = next((one for one in self._waiting if self._is_free(one)), None)
        if following is None:
            return
        queue = self._waiting[following]
        place = queue.popleft()
        if queue:
            self._waiting.move_to_end(following)
        else:
            del self._waiting[following]
        self._running[following] += 1
        place.set_result(None)


@dataclass(frozen=True)
class RequestThreads:
    """All of them, by the kind of work."""

    requests: FairThreads = field(
        default_factory=lambda: FairThreads("request", threads=16, each=4)
    )
    """Handlers: milliseconds, a query or two."""
    files: FairThreads = field(default_factory=lambda: FairThreads("file", threads=4, each=1))
    """Reading and copying datasets: seconds to minutes, most of it in Python."""
    uploads: FairThreads = field(default_factory=lambda: FairThreads("upload", threads=8, each=2))
    """Writing what has arrived of a file."""
    texts: FairThreads = field(default_factory=lambda: FairThreads("text", threads=4, each=1))
    """Parsing large bodies and counting the tokens of long prompts."""
    health: FairThreads = field(default_factory=lambda: FairThreads("health", threads=2, each=2))
    """A probe never waits for a request: whoever asks it would end the service."""

    @property
    def kinds(self) -> tuple[FairThreads, ...]:
        """Each of them."""
        return (self.requests, self.files, self.uploads, self.texts, self.health)

    @property
    def is_idle(self) -> bool:
        """No thread of any kind works."""
        return all(one.is_idle for one in self.kinds)

    def dismiss(self) -> None:
        """Let the idle threads end, so that the process can."""
        for one in self.kinds:
            one.dismiss()
