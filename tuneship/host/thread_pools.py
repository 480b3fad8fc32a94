"""Threads for blocking work, one pool for each purpose, and descriptions of threads that are stuck.

A stuck thread (in a file system that hangs, behind a database that does not answer) cannot be ended from outside. So
each purpose has threads of its own, which work of other purposes never waits for, and none keeps the process from
ending. Knows nothing of the service.
"""

import asyncio
import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
POLL_INTERVAL_S = 0.02
# The innermost frames of a stuck thread are enough to find the place.
MAX_FRAMES = 12

STACK_BYTES = 8 * 1024 * 1024


def use_large_stacks() -> None:
    """Give the threads that start from now on stacks of our size: the host's may be too small for a grammar compiler.

    Libraries go down into a schema by recursion, and where the stack ends, the process does.
    """
    threading.stack_size(STACK_BYTES)


class Threads:
    """Runs blocking work for one purpose, each call in a daemon thread of its own, a limited number at a time.

    Use it from one event loop.
    """

    def __init__(self, purpose: str, most: int) -> None:
        """`purpose` names the threads, so that a log can say which one is stuck."""
        self._purpose = purpose
        self.most = most
        self._free_threads = asyncio.Semaphore(most)
        self._running: set[threading.Thread] = set()

    async def run(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Run the work and return its result. After a cancellation, the thread still finishes its work."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        result: Future[R] = Future()
        # A running future takes its result also after a cancellation.
        result.set_running_or_notify_cancel()

        def run_work() -> None:
            try:
                result.set_result(context.run(work, *arguments, **named))
            except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
                result.set_exception(error)
            finally:
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._note_end, threading.current_thread())

        await self._free_threads.acquire()
        kind = getattr(work, "__qualname__", type(work).__name__)
        thread = threading.Thread(target=run_work, daemon=True, name=f"{self._purpose} ({kind})")
        self._running.add(thread)
        try:
            thread.start()
        except BaseException:
            self._note_end(thread)
            raise
        return await asyncio.wrap_future(result)

    def _note_end(self, thread: threading.Thread) -> None:
        self._running.discard(thread)
        self._free_threads.release()

    async def finish(self, patience_s: float) -> None:
        """Wait until no work runs any more, for at most `patience_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._running:  # noqa: ASYNC110 - it is rare, and threads have no event of the loop
                    await asyncio.sleep(POLL_INTERVAL_S)


def wait_for_threads(
    patience_s: float, besides: Collection[threading.Thread] = ()
) -> list[threading.Thread]:
    """Wait until only the calling thread and the threads of `besides` run, at most `patience_s` seconds.

    Returns the other threads that still run. Shut down the idle threads of a pool before
    (`ThreadPoolExecutor.shutdown(wait=False)`).
    """
    ignored = {threading.current_thread(), *besides}
    deadline = time.monotonic() + patience_s
    while left := [thread for thread in threading.enumerate() if thread not in ignored]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL_S)
    return left


def where_is(thread: threading.Thread) -> str:
    """The stack of a thread as `module:function:line`, innermost first; without values, which may be personal data."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the only way to another thread's stack
    if frame is None:
        return "it has just ended"
    stack = reversed(traceback.extract_stack(frame))
    places = [f"{Path(call.filename).stem}:{call.name}:{call.lineno}" for call in stack]
    return " < ".join(places[:MAX_FRAMES])


def where_waits(task: "asyncio.Task[object]") -> str:
    """The stack of a task that waits, in the format of `where_is`."""
    places: list[str] = []
    waiting = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).stem}:{code.co_name}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None)
    return " < ".join(reversed(places)) or "it has just ended"
