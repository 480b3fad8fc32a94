"""The parts that the HTTP boundary needs beside those of the handlers: API keys, rate limits, limits in flight."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tuneship.service.access.api_keys import Keys
from tuneship.service.context.context import Parts
from tuneship.service.context.request_slots import InFlightLimits
from tuneship.service.http.rate_limits import RateLimits


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
