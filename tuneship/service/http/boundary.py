"""The parts of the HTTP boundary that handlers do not need: API keys, rate limits, limits in flight."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tuneship.service.access.api_keys import Keys
from tuneship.service.context.parts import Parts
from tuneship.service.context.request_slots import RequestSlots
from tuneship.service.http.rate_limits import RateLimits


@dataclass(frozen=True)
class Boundary:
    """Everything that the boundary works with."""

    parts: Parts
    keys: Keys
    limits: RateLimits
    slots: RequestSlots = field(default_factory=RequestSlots)
    # Whether the service itself may take requests, apart from its database.
    is_fit: Callable[[], bool] = lambda: True
    # Seconds for which the result of a readiness check is given to all callers.
    ready_for_s: float = 1.0
