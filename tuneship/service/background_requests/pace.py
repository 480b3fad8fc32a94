"""Decides how many requests of batches are answered at once, so that they give way to everybody who waits.

While another request is in flight, each batch has one, so that it ends even then. Afterwards the number grows by one
with each answer: somebody who asks again and again meets few of them. The replicas' own scheduler prefers other
requests, too (`tuneship/serving/scheduler.py`). Lives on the event loop.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tuneship.service.common.in_flight import InFlightGenerations

# Requests of all batches in flight while nobody else asks.
MOST_AT_ONCE = 16
TakeSpare = Callable[[str], bool]


class BatchPace:
    """Divides what may be in flight among tenants, and then among the batches of each."""

    def __init__(self, in_flight: InFlightGenerations, take_spare: TakeSpare) -> None:
        """`take_spare` counts a request against its tenant's limit of requests, if there is enough of it left."""
        self._in_flight = in_flight
        self._take_spare = take_spare
        self._batches: Counter[str] = Counter()
        """Batches at work, by tenant."""
        self._allowed = 1

    @contextmanager
    def joined(self, client_id: str) -> "Generator[BatchShare]":
        """The share of one batch while it is at work."""
        self._batches[client_id] += 1
        try:
            yield BatchShare(self, client_id)
        finally:
            self._batches[client_id] -= 1
            if not self._batches[client_id]:
                del self._batches[client_id]

    def may_start(self, client_id: str, running: int) -> bool:
        """Whether a batch of this tenant with so many requests in flight may send one more."""
        if self._in_flight.has_interactive():
            self._allowed = 1
        share = self._allowed // (len(self._batches) * self._batches[client_id])
        return running < max(1, share) and self._take_spare(client_id)

    def ended(self) -> None:
        """Note that a request of a batch has ended."""
        if not self._in_flight.has_interactive():
            self._allowed = min(MOST_AT_ONCE, self._allowed + 1)


class BatchShare:
    """The requests of one batch that are in flight."""

    def __init__(self, pace: BatchPace, client_id: str) -> None:
        """Begin with none."""
        self._pace = pace
        self._client_id = client_id
        self._running = 0

    def take(self) -> bool:
        """Count one more request where it may be sent now, also against the tenant's limit; False where it may not."""
        if not self._pace.may_start(self._client_id, self._running):
            return False
        self._running += 1
        return True

    def give_back(self) -> None:
        """Note that a request has ended."""
        self._running -= 1
        self._pace.ended()
