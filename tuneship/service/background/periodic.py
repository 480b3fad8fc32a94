"""Work that is repeated while the service runs, and done once more when it ends."""

import asyncio
import logging
from collections.abc import Callable

from tuneship.host.thread_pools import Threads

logger = logging.getLogger(__name__)


# The timeout at the end of the service, both for work in flight and for the last time; together
# less than `shutdown.TASKS_END_S`.
LAST_TIME_S = 3.0


class Periodic:
    """A background task of the service, with a thread of its own."""

    def __init__(
        self,
        work: Callable[[], None],
        every_s: float,
        failed: str,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`work` may block and may raise; `failed` is the log line for an error.

        `is_needed` says at once whether there is work, since starting a thread costs half a millisecond.
        """
        self._work = work
        self._is_needed = is_needed
        self._every_s = every_s
        self._failed = failed
        self._threads = Threads("periodic", 1)

    async def run(self) -> None:
        """Repeat the work until the task is cancelled, then do it once more."""
        try:
            while True:
                await self._once()
                await asyncio.sleep(self._every_s)
        finally:
            await self._threads.finish(LAST_TIME_S)
            async with asyncio.timeout(LAST_TIME_S):
                await self._once()

    async def _once(self) -> None:
        if not self._is_needed():
            return
        try:
            await self._threads.run(self._work)
        except Exception:
            # The database or the disk is away, as requests report too: the next time tries again.
            logger.exception("%s", self._failed)
