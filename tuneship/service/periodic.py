"""Work that is done every so often while the service runs, and once more when it ends."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Periodic:
    """A background task of the service."""

    def __init__(self, tend: Callable[[], None], every_s: float, failed: str) -> None:
        """`tend` may block and may fail; `failed` says in the log what could not be done."""
        self._tend = tend
        self._every_s = every_s
        self._failed = failed

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._once()
                await asyncio.sleep(self._every_s)
        finally:
            await asyncio.to_thread(self._tend)

    async def _once(self) -> None:
        try:
            await asyncio.to_thread(self._tend)
        except (
            Exception
        ):  # the database or the disk is away: requests say so, the next time tries again
            logger.exception("%s", self._failed)
