"""Threads for blocking work, kept apart by purpose, and what is known of those that never come back.

A thread that is stuck (in a file system that hangs, behind a database that does not answer) cannot be ended from
outside. So each purpose has threads of its own, which others never wait for, and none of them keeps the process from
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
LOOK_EVERY_S = 0.02
# Of a stuck thread's stack, the innermost ones.
FRAMES_NAMED = 12


class Threads:
    """Runs blocking work for one purpose, each piece in a daemon thread of its own, a limited number at a time.

    To be used from one event loop.
    """

    def __init__(self, purpose: str, most: int) -> None:
        """`purpose` names the threads, so that a log can say which one is stuck."""
        self._purpose = purpose
        self._room = asyncio.Semaphore(most)
        self._running: set[threading.Thread] = set()

    async def run(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Do the work and return its result. When this is cancelled, the thread still finishes its work."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        result: Future[R] = Future()
        result.set_running_or_notify_cancel()  # so that the result can be set after a cancellation

        def do() -> None:
            try:
                result.set_result(context.run(work, *arguments, **named))
            except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
                result.set_exception(error)
            finally:
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._has_ended, threading.current_thread())

        await self._room.acquire()
        thread = threading.Thread(target=do, daemon=True, name=f"{self._purpose} ({_name(work)})")
        self._running.add(thread)
        try:
            thread.start()
        except BaseException:
            self._has_ended(thread)
            raise
        return await asyncio.wrap_future(result)

    def _has_ended(self, thread: threading.Thread) -> None:
        self._running.discard(thread)
        self._room.release()

    async def finish(self, patience_s: float) -> None:
        """Wait until nothing runs any more, or until the patience is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._running:  # noqa: ASYNC110 - it is rare, and threads have no event of the loop
                    await asyncio.sleep(LOOK_EVERY_S)


def _name(work: Callable[..., object]) -> str:
    return getattr(work, "__qualname__", type(work).__name__)


def wait_for_threads(
    patience_s: float, besides: Collection[threading.Thread] = ()
) -> list[threading.Thread]:
    """Wait until only the calling thread and those of `besides` run; return what still runs when the patience is over.

    Idle threads of a pool have to be dismissed before (`ThreadPoolExecutor.shutdown(wait=False)`).
    """
    ignored = {threading.current_thread(), *besides}
    end = time.monotonic() + patience_s
    while left := [one for one in threading.enumerate() if one not in ignored]:
        if time.monotonic() > end:
            break
        time.sleep(LOOK_EVERY_S)
    return left


def where_is(thread: threading.Thread) -> str:
    """Where a thread stands, innermost first, as `module:function:line`; no values, which might be of a patient."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the only way to another thread's stack
    if frame is None:
        return "it has just ended"
    stack = reversed(traceback.extract_stack(frame))
    places = [f"{Path(one.filename).stem}:{one.name}:{one.lineno}" for one in stack]
    return " < ".join(places[:FRAMES_NAMED])


def where_waits(task: "asyncio.Task[object]") -> str:
    """What a task waits for, innermost first, in the same words."""
    places: list[str] = []
    waiting = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).stem}:{code.co_name}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None)
    return " < ".join(reversed(places)) or "it has just ended"
