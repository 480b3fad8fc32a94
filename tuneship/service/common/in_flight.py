"""Which generations run now, by deployment: a deleted one lets them finish, and replicas follow them (`scaling.py`).

Lives on the event loop.
"""

import asyncio
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from tuneship.service.common.scaling import Demand

LOOK_EVERY_S = 0.05


@dataclass(eq=False)
class Visit:
    """One generation; `limit` is its deadline while the model works on it."""

    limit: asyncio.Timeout | None = None
    is_ended: bool = False
    """Its deployment is being deleted, and does not wait for it."""
    waits_since: datetime | None = None
    """When it was given to the replicas, until the first token comes."""
    accepted: float | None = None
    """When its request came (`time.perf_counter`); None until its deployment is known to be the caller's."""
    endpoint_id: str = ""

    def waits(self, now: datetime) -> None:
        """It is in a replica's queue, or a replica is started for it."""
        self.waits_since = now

    def is_served(self) -> None:
        """A token has come."""
        self.waits_since = None


class UnderWay:
    """Nothing here survives the process, and nothing needs to: neither do the requests."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._visits: dict[str, set[Visit]] = {}
        self._peaks: dict[str, int] = {}
        self._hurried: set[str] = set()

    @contextmanager
    def entered(self, deployment_id: str) -> Generator[Visit]:
        """Enter before the deployment's record is read: then nothing is unloaded under a request."""
        visit = Visit()
        visits = self._visits.setdefault(deployment_id, set())
        visits.add(visit)
        self._peaks[deployment_id] = max(self._peaks.get(deployment_id, 0), len(visits))
        try:
            yield visit
        finally:
            self._visits[deployment_id].discard(visit)
            if not self._visits[deployment_id]:
                del self._visits[deployment_id]

    def ages_ms(self, deployment_id: str, endpoint_id: str | None = None) -> list[float]:
        """How long ago the requests came that are being answered (through the endpoint). From any thread."""
        now = time.perf_counter()
        visits = list(self._visits.get(deployment_id, ()))  # in one step of the interpreter
        return [
            (now - visit.accepted) * 1000
            for visit in visits
            if visit.accepted is not None and endpoint_id in (None, visit.endpoint_id)
        ]

    def take_demand(self, deployment_id: str, now: datetime) -> Demand:
        """What the deployment's callers wanted since this was last asked."""
        visits = self._visits.get(deployment_id, ())
        since = [one.waits_since for one in visits if one.waits_since is not None]
        waited = max((now - moment for moment in since), default=timedelta())
        peak = max(self._peaks.pop(deployment_id, 0), len(visits))
        return Demand(peak, len(since), waited)

    def forget_others(self, deployment_ids: Collection[str]) -> None:
        """Callers may name anything; only what these deployments' callers did is of interest."""
        self._peaks = {name: one for name, one in self._peaks.items() if name in deployment_ids}

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
                        visit.is_ended = True
                        visit.limit.reschedule(loop.time())
            await asyncio.sleep(LOOK_EVERY_S)
        self._hurried.discard(deployment_id)
