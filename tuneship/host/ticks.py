"""Repeated steps: frequent while there is work, rare while there is none, and immediate after a change."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta

from tuneship.host.waiting import wait_for_event

logger = logging.getLogger(__name__)

# The pause after a step that has found work, and after one that has found none. The second is for what no change
# announces, such as a time that has come: a service that does nothing must leave the processor to others.
TICK_S, IDLE_TICK_S = 0.2, 2.0
# The shortest time between two steps, whatever changes: many small writes must not make every loop read each time.
SHORTEST_TICK_S = 0.05
RETRY_PAUSE_S = 1.0


class Ticks:
    """Repeats steps, each on the event loop that calls `repeat`."""

    def __init__(
        self,
        tick_s: float = TICK_S,
        idle_tick_s: float = IDLE_TICK_S,
        shortest_s: float = SHORTEST_TICK_S,
    ) -> None:
        """Start before the first step; the pauses are those of the constants above unless given."""
        self._tick_s = tick_s
        self._idle_tick_s = idle_tick_s
        self._shortest_s = shortest_s
        self._woken: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def wake(self) -> None:
        """Take the next steps now. May be called from any thread, after the change that they are to see."""
        for loop, event in [*self._woken]:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(event.set)

    async def repeat(self, step: Callable[[], Awaitable[bool | None]]) -> None:
        """Repeat a step until cancelled, also after errors; the step returns whether it has found work."""
        woken = asyncio.Event()
        place = (asyncio.get_running_loop(), woken)
        self._woken.append(place)
        try:
            while True:
                # Before the step: a change in the middle of it may be one that it does not see.
                woken.clear()
                began = time.monotonic()
                try:
                    has_work = await step()
                except Exception:  # the loop must outlive any failure; the next tick tries again
                    logger.exception("supervision failed")
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                await wait_for_event(woken, self._tick_s if has_work else self._idle_tick_s)
                await asyncio.sleep(max(0.0, began + self._shortest_s - time.monotonic()))
        finally:
            self._woken.remove(place)


def is_early(now: datetime, due: datetime, every: timedelta) -> bool:
    """Whether it is not time yet. After the clock was set back it is time."""
    return due - every <= now < due
