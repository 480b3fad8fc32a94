"""Limits how many requests of one kind may be in flight. Knows no HTTP framework."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tuneship.contract.errors import InternalError, RateLimitExceeded
from tuneship.service.context.bindings import BoundOperation


class InFlightLimits:
    """Limits how many requests of one kind may be in flight, for each client and together."""

    def __init__(self, each: int, together: int) -> None:
        """A client has at most `each` slots, fewer while others hold most of `together`, but always one."""
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
class RequestSlots:
    """The limits on requests in flight, by the kind of work."""

    generations: InFlightLimits = field(
        default_factory=lambda: InFlightLimits(each=64, together=256)
    )
    uploads: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=4, together=16))
    merges: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=4, together=16))
    # Each may need as much memory as two copies of its base model.
    exports: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=1, together=2))
    # Streams of open pages of the console: people who look must not take those of programs.
    pages: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=32, together=128))
    streams: InFlightLimits = field(default_factory=lambda: InFlightLimits(each=16, together=256))

    def of(self, bound: BoundOperation) -> InFlightLimits | None:
        """The limit of an operation; most are over in milliseconds and need none."""
        if bound.operation.is_download:
            return self.exports
        if bound.is_async:
            return self.generations
        if bound.operation.is_form:
            return self.uploads
        return self.merges if bound.is_long else None
