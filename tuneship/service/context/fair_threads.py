"""Threads for requests, shared fairly: no tenant can occupy all of them, and long work has a pool of its own.

Knows no request; the boundary names the tenant of the work.
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
    """A pool of threads in which tenants with waiting work take turns, independent of how much work each has.

    Used by one event loop.
    """

    def __init__(self, name: str, threads: int, each: int) -> None:
        """`each`: threads that one tenant may have at the same time; `name` is part of the threads' names."""
        self.threads = threads
        self._each = each
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, f"tuneship-{name}")

    @property
    def is_idle(self) -> bool:
        """Whether no thread of this pool works. The work of a cancelled request still runs to its end."""
        return not self._running

    def dismiss(self) -> None:
        """Let the idle threads end, and accept no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, owner: str, work: Callable[..., R], *arguments: Any) -> R:
        """Do `work` in a thread when it is the owner's turn."""
        await self._wait_for_turn(owner)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def finish(done: "Future[R]") -> None:
            self._release(owner)
            if answer.done():  # the request was cancelled
                return
            if (error := done.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        def ended(done: "Future[R]") -> None:
            with suppress(RuntimeError):  # the loop is closed: no request waits any more
                loop.call_soon_threadsafe(finish, done)

        self._pool.submit(work, *arguments).add_done_callback(ended)
        return await answer

    async def _wait_for_turn(self, owner: str) -> None:
        # Work waits only where it may not have a free thread, so none that waits is overtaken here.
        if self._may_start(owner):
            self._running[owner] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It was given a thread in the same moment, which the next one may have.
                self._release(owner)
            elif (queue := self._waiting.get(owner)) is not None and turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._waiting[owner]
            raise

    def _may_start(self, owner: str) -> bool:
        return self._running.total() < self.threads and self._running[owner] < self._each

    def _release(self, owner: str) -> None:
        """Give the thread to the next tenant that may have one more."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        while (
            next_owner := next((one for one in self._waiting if self._may_start(one)), None)
        ) is not None:
            queue = self._waiting[next_owner]
            turn = queue.popleft()
            if queue:
                self._waiting.move_to_end(next_owner)
            else:
                del self._waiting[next_owner]
            # A task that was cancelled in this iteration of the event loop has not left the queue yet.
            if not turn.cancelled():
                self._running[next_owner] += 1
                turn.set_result(None)
                return


@dataclass(frozen=True)
class RequestThreads:
    """The thread pools of requests, by the kind of work."""

    # For handlers: milliseconds, a query or two.
    requests: FairThreads = field(
        default_factory=lambda: FairThreads("request", threads=16, each=4)
    )
    # For reading datasets of a limited size, and copying them: seconds, most of it in Python.
    files: FairThreads = field(default_factory=lambda: FairThreads("file", threads=4, each=1))
    # For waiting for the processes of imports and exports, which take minutes with a large base model.
    conversions: FairThreads = field(
        default_factory=lambda: FairThreads("conversion", threads=4, each=1)
    )
    # For reading datasets of any size while their callers wait.
    validations: FairThreads = field(
        default_factory=lambda: FairThreads("validation", threads=4, each=1)
    )
    # For writing the blocks of a file that have arrived.
    uploads: FairThreads = field(default_factory=lambda: FairThreads("upload", threads=8, each=2))
    # For parsing large bodies and counting the tokens of long prompts.
    texts: FairThreads = field(default_factory=lambda: FairThreads("text", threads=4, each=1))
    # For making pages of the console.
    pages: FairThreads = field(default_factory=lambda: FairThreads("page", threads=4, each=2))
    # For health checks, which must not wait for requests: a supervisor would end a service that answers late.
    health: FairThreads = field(default_factory=lambda: FairThreads("health", threads=2, each=2))

    @property
    def kinds(self) -> tuple[FairThreads, ...]:
        """All pools of threads."""
        return (
            self.requests,
            self.files,
            self.conversions,
            self.validations,
            self.uploads,
            self.texts,
            self.pages,
            self.health,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no thread of any pool works."""
        return all(pool.is_idle for pool in self.kinds)

    def dismiss(self) -> None:
        """Let the idle threads end, so that the process can."""
        for pool in self.kinds:
            pool.dismiss()
