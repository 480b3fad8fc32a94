"""Decides how many background requests are answered at once, so that they give way to everybody who waits.

While somebody asks, each run has one, so that it ends even then, and a tenant begins one only now and then. The short
pauses of callers who ask one request after the other count, too: what begins in such a pause would run beside the next
request. Afterwards the number grows by one with each answer. The replicas' own scheduler prefers other requests, too
(`tuneship/serving/scheduler.py`). Lives on the event loop.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tuneship.service.context.drain import Drain
from tuneship.service.telemetry.in_flight import InFlightGenerations

# Background requests in flight while nobody else asks.
MOST_AT_ONCE = 16
# The pause after which a tenant begins one more beside callers, and how long a caller counts after the last answer.
BESIDE_OTHERS_S = 0.25
TakeSpare = Callable[[str], bool]


class BackgroundPace:
    """Divides the allowed requests in flight among tenants, and then among each tenant's runs."""

    def __init__(self, in_flight: InFlightGenerations, take_spare: TakeSpare, drain: Drain) -> None:
        """`take_spare` charges one request to a tenant's limit; False if too little of it is left."""
        self._in_flight = in_flight
        self._take_spare = take_spare
        self._drain = drain
        # Runs at work, by tenant.
        self._runs: Counter[str] = Counter()
        self._allowed = 1
        # When the last request of each tenant began.
        self._began: dict[str, float] = {}

    @property
    def is_draining(self) -> bool:
        """Whether the service ends, so that no request may start."""
        return self._drain.has_begun

    @contextmanager
    def joined(self, client_id: str) -> Generator[None]:
        """Count a run of this tenant inside the block."""
        self._runs[client_id] += 1
        try:
            yield
        finally:
            self._runs[client_id] -= 1
            if not self._runs[client_id]:
                del self._runs[client_id]
                self._began.pop(client_id, None)

    def may_start(self, client_id: str, running: int) -> bool:
        """Whether a run with this many requests in flight may send one more; if so, it is charged to the tenant's
        limit.
        """
        now = time.monotonic()
        if self._in_flight.has_callers(BESIDE_OTHERS_S):
            self._allowed = 1
            if now - self._began.get(client_id, -math.inf) < BESIDE_OTHERS_S:
                return False
        share = self._allowed // (len(self._runs) * self._runs[client_id])
        may_start = running < max(1, share) and self._take_spare(client_id)
        if may_start:
            self._began[client_id] = now
        return may_start

    def ended(self) -> None:
        """Note that a request has ended."""
        if not self._in_flight.has_callers(BESIDE_OTHERS_S):
            self._allowed = min(MOST_AT_ONCE, self._allowed + 1)
