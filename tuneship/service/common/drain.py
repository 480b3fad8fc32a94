"""The end of a service, said once to everybody who has to know: newcomers get 503, streams end, the rest may finish."""

import asyncio


class Drain:
    """Begins at most once and never ends."""

    def __init__(self) -> None:
        """Not draining."""
        self._begun = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether the service is going away."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Called on the event loop's thread."""
        self._begun.set()

    async def wait(self) -> None:
        """Until the drain begins."""
        await self._begun.wait()
