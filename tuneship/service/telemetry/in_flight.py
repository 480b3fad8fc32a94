"""Counts the generations in flight by deployment, so that a deleted one can drain and replicas can follow the demand.

Lives on the event loop. What follows the demand is `deployments/scaling.py`.
"""

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

POLL_S = 0.05
# Upper edges of the histogram of ages. From 10 s on they are close, since gates need to know which requests are
# certainly older than a limit.
AGES_MS = (
    *(100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 12_000.0, 15_000.0, 20_000.0),
    *(25_000.0, 30_000.0, 40_000.0, 50_000.0, 60_000.0, 80_000.0, 100_000.0, 120_000.0),
    *(150_000.0, 200_000.0, 250_000.0, 300_000.0, 400_000.0, 500_000.0, 600_000.0),
)


@dataclass(eq=False)
class InFlightGeneration:
    """One generation in flight; `limit`: the deadline of the model's work."""

    limit: asyncio.Timeout | None = None
    # Its deployment is being deleted, and no longer waits for it.
    is_ended: bool = False
    # When it was given to the replicas; None before that and after its first token.
    queued_since: datetime | None = None
    # When its request came (`time.perf_counter`); None until its deployment is known to be the caller's.
    accepted: float | None = None
    endpoint_id: str = ""
    # When its first token came (`time.perf_counter`).
    first_token: float | None = None
    # It belongs to a batch.
    is_background: bool = False

    def queued(self, now: datetime) -> None:
        """Note that it waits in a replica's queue, or for a replica to start."""
        self.queued_since = now
        self.first_token = None

    def started(self) -> None:
        """Note the arrival of a token; only the first one counts."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
            self.queued_since = None


@dataclass(frozen=True)
class Demand:
    """The requests to a deployment."""

    # The peak since the last decision, so that short requests between two decisions count.
    in_flight: int = 0
    # Requests without a first token.
    waiting: int = 0
    # The longest wait of them.
    waited: timedelta = timedelta()


class InFlightGenerations:
    """All generations in flight, in memory only: after a restart there are none."""

    def __init__(self) -> None:
        """Start with none."""
        self._running: dict[str, set[InFlightGeneration]] = {}
        self._peaks: dict[str, int] = {}
        # When the last one that somebody waited for has ended (`time.monotonic`).
        self._waited_at = -math.inf

    @contextmanager
    def track(
        self, deployment_id: str, *, is_background: bool = False
    ) -> Generator[InFlightGeneration]:
        """Count one generation. Enter it before reading the deployment's record, so that the model is not unloaded
        meanwhile.
        """
        generation = InFlightGeneration(is_background=is_background)
        running = self._running.setdefault(deployment_id, set())
        running.add(generation)
        self._peaks[deployment_id] = max(self._peaks.get(deployment_id, 0), len(running))
        try:
            yield generation
        finally:
            if not is_background:
                self._waited_at = time.monotonic()
            self._running[deployment_id].discard(generation)
            if not self._running[deployment_id]:
                del self._running[deployment_id]

    def ages(self, deployment_id: str) -> dict[str, list[int]]:
        """Count the requests that somebody waits for by the time since they came, in the buckets of `AGES_MS`.

        By endpoint, which is empty for direct calls. May be called from any thread.
        """
        now = time.perf_counter()
        ages: dict[str, list[int]] = {}
        for moment, one in self._accepted(deployment_id):
            if not one.is_background:
                counts = ages.setdefault(one.endpoint_id, [0] * (len(AGES_MS) + 1))
                counts[bisect_left(AGES_MS, (now - moment) * 1000)] += 1
        return ages

    def all_ages(self) -> dict[str, dict[str, list[int]]]:
        """The same of every deployment that has such requests. May be called from any thread."""
        found = ((name, self.ages(name)) for name in list(self._running))
        return {name: ages for name, ages in found if ages}

    def accepted(self, deployment_id: str) -> int:
        """The number of a deployment's requests in flight, including those of batches. Thread-safe."""
        return len(self._accepted(deployment_id))

    def _accepted(self, deployment_id: str) -> list[tuple[float, InFlightGeneration]]:
        # `list` copies the set in one step of the interpreter, so no lock is needed.
        running = list(self._running.get(deployment_id, ()))
        return [(one.accepted, one) for one in running if one.accepted is not None]

    def queued(self, deployment_id: str) -> int:
        """How many requests in flight wait for their first token. May be called from any thread."""
        running = list(self._running.get(deployment_id, ()))
        return sum(generation.queued_since is not None for generation in running)

    def total(self) -> int:
        """How many generations of all deployments are in flight. May be called from any thread."""
        return sum(len(running) for running in list(self._running.values()))

    def has_callers(self, within_s: float) -> bool:
        """Whether somebody waits for a generation, or did so in the last seconds."""
        is_waiting = any(
            not one.is_background for running in self._running.values() for one in running
        )
        return is_waiting or time.monotonic() - self._waited_at < within_s

    def take_demand(self, deployment_id: str, now: datetime) -> Demand:
        """The demand on a deployment since the last call, which resets the peak."""
        running = self._running.get(deployment_id, ())
        queued = [one.queued_since for one in running if one.queued_since is not None]
        waited = max((now - moment for moment in queued), default=timedelta())
        peak = max(self._peaks.pop(deployment_id, 0), len(running))
        return Demand(peak, len(queued), waited)

    def take_all_demand(self, now: datetime) -> dict[str, Demand]:
        """The demand on each deployment that was asked since the last call, which resets the peaks."""
        return {
            name: self.take_demand(name, now) for name in self._peaks.keys() | self._running.keys()
        }

    def count(self, deployment_id: str) -> int:
        """How many generations of the deployment are in flight."""
        return len(self._running.get(deployment_id, ()))

    def forget_others(self, deployment_ids: Collection[str]) -> None:
        """Drop the peaks of all other deployments: a request may name any id, and each would leave one here."""
        self._peaks = {name: peak for name, peak in self._peaks.items() if name in deployment_ids}

    def end_all(self, deployment_id: str) -> None:
        """End the generations of a deleted deployment, as if their time were over."""
        for generation in self._running.get(deployment_id, ()):
            if generation.limit is not None:
                generation.is_ended = True
                generation.limit.reschedule(asyncio.get_running_loop().time())

    async def wait_until_drained(self, deployment_id: str, timeout_s: float) -> None:
        """Wait until a deployment has no generations; after the timeout the remaining ones are ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while deployment_id in self._running:
            if loop.time() >= deadline:
                self.end_all(deployment_id)
            await asyncio.sleep(POLL_S)
