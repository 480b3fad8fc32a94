"""Limits how many requests of one kind may be in flight. Knows no HTTP framework."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from tuneship.contract.errors import InternalError, RateLimitExceeded


class InFlightLimits:
    """Limits how many requests of one kind may be in flight, for each client and together."""

    def __init__(self, each: int, together: int) -> None:
        """A client has `each` at most, fewer when others have most of `together`, but always one."""
        self._each = each
        self._together = together
        self._running: Counter[str] = Counter()

    @contextmanager
    def slot(self, client_id: str) -> Generator[None]:
        """Hold a slot. Raises `RateLimitExceeded` when the client has too many, 503 when the service is busy."""
        own, left = self._running[client_id], self._together - self._running.total()
        if own >= self._each:
            raise RateLimitExceeded("too many of these requests at the same time", retry_after=1)
        # A client without any request is let in: that others hold the slots is not its fault.
        if own and own >= left:
            raise InternalError("the service is busy", status=503, retry_after=1)
        self._running[client_id] += 1
        try:
            yield
        finally:
            self._running[client_id] -= 1
            if not self._running[client_id]:
                del self._running[client_id]
