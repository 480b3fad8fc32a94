"""Work that is done every so often while the service runs, and once more when it ends."""

import asyncio
import logging
from collections.abc import Callable

from tuneship.host.thread_pools import Threads

logger = logging.getLogger(__name__)


# For the work at the end of the service, and for what is under way then; together less than
# `ending.TASKS_END_S`.
LAST_TIME_S = 3.0


class Periodic:
    """A background task of the service, with a thread of its own."""

    def __init__(self, tend: Callable[[], None], every_s: float, failed: str) -> None:
        """`tend` may block and may fail; `failed` says in the log what could not be done."""
        self._tend = tend
        self._every_s = every_s
        self._failed = failed
        self._threads = Threads("periodic", 1)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._once()
                await asyncio.sleep(self._every_s)
        finally:
            await self._threads.finish(LAST_TIME_S)
            async with asyncio.timeout(LAST_TIME_S):
                await self._once()

    async def _once(self) -> None:
        try:
            await self._threads.run(self._tend)
        except (
            Exception
        ):  # the database or the disk is away: requests say so, the next time tries again
            logger.exception("%s", self._failed)
