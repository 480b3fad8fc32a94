"""Which generations run now, by deployment, so that a deleted deployment lets them finish. Lives on the event loop."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

LOOK_EVERY_S = 0.05


@dataclass(eq=False)
class Visit:
    """One generation; `limit` is its deadline while the model works on it."""

    limit: asyncio.Timeout | None = None


class UnderWay:
    """Nothing here survives the process, and nothing needs to: neither do the requests."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._visits: dict[str, set[Visit]] = {}
        self._hurried: set[str] = set()

    @contextmanager
    def entered(self, deployment_id: str) -> Generator[Visit]:
        """Enter before the deployment's record is read: then nothing is unloaded under a request."""
        visit = Visit()
        self._visits.setdefault(deployment_id, set()).add(visit)
        try:
            yield visit
        finally:
            self._visits[deployment_id].discard(visit)
            if not self._visits[deployment_id]:
                del self._visits[deployment_id]

    def hurry(self, deployment_id: str) -> None:
        """A forced delete waits for nobody; may be called from any thread."""
        self._hurried.add(deployment_id)

    async def drained(self, deployment_id: str, patience_s: float) -> None:
        """Returns when no generation of the deployment runs; those that last longer are ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while visits := self._visits.get(deployment_id):
            if loop.time() >= end or deployment_id in self._hurried:
                for visit in visits:
                    if visit.limit is not None:
                        visit.limit.reschedule(loop.time())
            await asyncio.sleep(LOOK_EVERY_S)
        self._hurried.discard(deployment_id)
