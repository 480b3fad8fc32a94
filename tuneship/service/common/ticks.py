"""Steps that are repeated at every tick of a loop, and at once after a change."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from tuneship.host.waiting import wait_for_event

logger = logging.getLogger(__name__)

TICK_S = 0.2
RETRY_PAUSE_S = 1.0


class Ticks:
    """Repeats steps on one event loop."""

    def __init__(self) -> None:
        """Begin without a wake-up."""
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Take the next step now; called on the event loop's thread."""
        self._woken.set()

    async def repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step until cancelled, whatever fails."""
        while True:
            try:
                await step()
            except Exception:  # the loop must outlive any failure; the next tick tries again
                logger.exception("supervision failed")
                await asyncio.sleep(RETRY_PAUSE_S)
            self._woken.clear()
            await wait_for_event(self._woken, TICK_S)


def is_early(now: datetime, due: datetime, every: timedelta) -> bool:
    """Whether it is not time yet. After the clock was set back it is time."""
    return due - every <= now < due
