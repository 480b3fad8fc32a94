"""The parts that the HTTP boundary needs beside those of the handlers: API keys, rate limits, limits in flight."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tuneship.contract.errors import InternalError, RateLimitExceeded
from tuneship.service.access.api_keys import Keys
from tuneship.service.context.context import Parts
from tuneship.service.http.rate_limits import RateLimits


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


@dataclass(frozen=True)
class Boundary:
    """Everything that the boundary works with."""

    parts: Parts
    keys: Keys
    limits: RateLimits
    generations: InFlightLimits = field(
        default_factory=lambda: InFlightLimits(each=64, together=256)
    )
    uploads: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=4, together=16))
    merges: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=4, together=16))
    exports: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=1, together=2))
    """Each may need as much memory as two copies of its base model."""
    streams: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=16, together=256))
    is_fit: Callable[[], bool] = lambda: True
    """Whether the service itself may take requests, apart from its database."""
    ready_for_s: float = 1.0
    """Seconds for which the result of a readiness check is given to all callers."""
