"""Graceful shutdown within a bounded time: tasks that hang are named in the log and abandoned."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tuneship.host.thread_pools import wait_for_threads, where_is, where_waits

logger = logging.getLogger(__name__)

# The timeout of all background tasks together after their cancellation, in which they store what is
# not stored yet.
TASKS_END_S = 11.0
LAST_TASKS_END_S = 1.0
# The timeout of threads that are still at work when everything is stored.
THREADS_END_S = 1.0


async def end_tasks(
    tasks: Collection["asyncio.Task[Any]"], timeout_s: float
) -> set["asyncio.Task[Any]"]:
    """Cancel tasks and wait for their end; log and return those that have not ended within the timeout."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return set()
    ended, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        logger.warning("a task does not end and is left behind: %s", where_waits(task))
    for task in ended:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a task failed at its end: %s", type(error).__name__, exc_info=error)
    return late


async def leave(spare: ThreadPoolExecutor, dismiss: Callable[[], None]) -> None:
    """Return if the interpreter can end by itself; otherwise log the stuck threads and end the process (exit code 0).

    The interpreter would wait forever for a thread that is stuck. Call this when everything that matters is stored.
    `spare`: the event loop's own pool; it is dismissed, and `dismiss` lets the idle threads of requests end.
    """
    late = await end_tasks(asyncio.all_tasks() - {asyncio.current_task()}, LAST_TASKS_END_S)
    spare.shutdown(wait=False, cancel_futures=True)
    dismiss()
    stuck = wait_for_threads(THREADS_END_S)
    for thread in stuck:
        logger.warning(
            "a thread is stuck and is left behind: %s: %s", thread.name, where_is(thread)
        )
    if late or stuck:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
