"""What the boundary needs beside the handlers' parts: keys, windows, and how much may be under way."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tuneship.contract.errors import InternalError, RateLimitExceeded
from tuneship.service.access.api_keys import Keys
from tuneship.service.context.context import Parts
from tuneship.service.http.rate_limits import RateLimits


class InFlightLimits:
    """How many requests of one kind each client has under way, and all clients together."""

    def __init__(self, each: int, together: int) -> None:
        """A client has `each` at most, fewer when others have most of `together`, but always one."""
        self._each = each
        self._together = together
        self._running: Counter[str] = Counter()

    @contextmanager
    def slot(self, client_id: str) -> Generator[None]:
        own, left = self._running[client_id], self._together - self._running.total()
        if own >= self._each:
            raise RateLimitExceeded("too many of these requests at the same time", retry_after=1)
        if own and own >= left:  # whoever has none is let in: others' places are not its fault
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
    """What the boundary needs beside the handlers' parts."""

    parts: Parts
    keys: Keys
    limits: RateLimits
    wake: Callable[[], None]
    """Tells the supervisor that something was committed."""
    generations: InFlightLimits = field(
        default_factory=lambda: InFlightLimits(each=64, together=256)
    )
    uploads: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=4, together=16))
    merges: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=4, together=16))
    streams: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=16, together=256))
