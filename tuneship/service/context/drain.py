"""The drain at the end of a service: new requests get 503, streams end, and the other requests may finish.

It may be announced before, so that a balancer sends no more requests when it begins.
"""

import asyncio


class Drain:
    """Flags that are set at most once and never reset."""

    def __init__(self) -> None:
        """Start without draining."""
        self._begun = asyncio.Event()
        # Whether the service will end soon, and says so in `/readyz`.
        self.is_announced = False

    @property
    def has_begun(self) -> bool:
        """Whether the service is draining."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Begin the drain. Called on the event loop's thread."""
        self.is_announced = True
        self._begun.set()

    async def wait(self) -> None:
        """Return when the drain begins."""
        await self._begun.wait()
