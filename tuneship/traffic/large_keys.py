"""Finds the routing keys with so many requests that they would decide a rollout if they stayed at one deployment.

Keys are hashes that never leave this process. Pure.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

MINUTES: Final = 10
# A key is large with more than this share of an endpoint's requests, once there were so many.
LARGE_SHARE: Final = 0.02
LEAST_REQUESTS: Final = 500
# A key that is large is among so many of each minute with certainty only if it is among the most frequent ones.
KEPT_KEYS: Final = 64
MOST_KEYS: Final = 1_024
NO_KEYS: Final[frozenset[int]] = frozenset()


@dataclass(slots=True)
class _Minute:
    number: int
    requests: int = 0
    by_key: dict[int, int] = field(default_factory=dict[int, int])

    def prune(self) -> None:
        """Keep the most frequent keys."""
        ordered = sorted(self.by_key.items(), key=lambda pair: pair[1], reverse=True)
        self.by_key = dict(ordered[:KEPT_KEYS])


@dataclass(slots=True)
class _Counts:
    """The requests of one endpoint."""

    now: _Minute
    past: deque[_Minute]
    large: frozenset[int] = NO_KEYS


class LargeKeys:
    """Counts the requests of each endpoint by routing key, and decides each minute which keys are large."""

    def __init__(self) -> None:
        """Start with none."""
        self._endpoints: dict[str, _Counts] = {}

    def count(self, endpoint_id: str, key: int | None, now_s: float) -> frozenset[int]:
        """Count one request, and return the endpoint's large keys of this minute. `key`: its hash."""
        number = int(now_s) // 60
        counts = self._endpoints.get(endpoint_id)
        if counts is None or counts.now.number != number:
            counts = self._turn(endpoint_id, counts, number)
        minute = counts.now
        minute.requests += 1
        if key is not None:
            minute.by_key[key] = minute.by_key.get(key, 0) + 1
            if len(minute.by_key) > MOST_KEYS:
                minute.prune()
        return counts.large

    def _turn(self, endpoint_id: str, counts: _Counts | None, number: int) -> _Counts:
        """Begin a minute of an endpoint, and forget endpoints without requests."""
        if counts is None:
            self._endpoints = {
                name: one
                for name, one in self._endpoints.items()
                if number - one.now.number < MINUTES
            }
            counts = self._endpoints[endpoint_id] = _Counts(_Minute(number), deque())
            return counts
        counts.now.prune()
        counts.past.append(counts.now)
        # A clock that was set back may leave minutes that are yet to come.
        while counts.past and not 0 < number - counts.past[0].number <= MINUTES:
            counts.past.popleft()
        counts.now = _Minute(number)
        limit = LARGE_SHARE * sum(minute.requests for minute in counts.past)
        total: dict[int, int] = {}
        for minute in counts.past:
            for key, requests in minute.by_key.items():
                total[key] = total.get(key, 0) + requests
        is_enough = limit >= LARGE_SHARE * LEAST_REQUESTS
        large = (key for key, requests in total.items() if requests > limit)
        counts.large = frozenset(large) if is_enough else NO_KEYS
        return counts
