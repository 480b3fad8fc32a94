"""Collects observations in memory, in windows of one second, and hands them to a store. No I/O.

`record` is called on the event loop and `hand_over` in the thread that stores, with a lock between them.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tuneship.metrics.observations import Observation
from tuneship.metrics.windows import MetricWindow


@dataclass(frozen=True)
class WindowKey:
    """The deployment and endpoint of a window, and its start in whole seconds since the epoch."""

    deployment_id: str
    endpoint_id: str
    start: int


# The largest share of a deployment's requests through an endpoint in a minute that a sticky key has in what the gates
# count; one request counts in any case.
LARGEST_SHARE = 0.05


@dataclass(slots=True)
class _MinuteOfKeys:
    """One minute of a deployment's requests through one endpoint, and how many of them each sticky key sent."""

    number: int
    requests: int = 0
    by_key: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True)
class Totals:
    """The counts since the service started, of some deployments by endpoint, and of all together."""

    # By deployment id and endpoint id; the second is empty for direct calls.
    by_target: Mapping[tuple[str, str], MetricWindow]
    # Also holds the counts of deployments that are forgotten by now.
    together: MetricWindow


class Recorder:
    """The windows that are not stored yet, and the totals of the stored ones."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Start empty. `secret`: the key of the callers' hashes; None draws one that only this process knows."""
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        self._windows: dict[WindowKey, MetricWindow] = {}
        self._totals: dict[tuple[str, str], MetricWindow] = {}
        self._together = MetricWindow()
        self._minutes: dict[tuple[str, str], _MinuteOfKeys] = {}
        self._secret = secret or secrets.token_bytes(32)

    def number_of(self, caller: str) -> int:
        """A hash of 32 bits for a caller."""
        # Keyed with a secret, so nobody can find the caller by trying names.
        digest = hashlib.blake2b(caller.encode(), digest_size=4, key=self._secret).digest()
        return int.from_bytes(digest)

    def record(self, observation: Observation) -> None:
        """Count one request in the second in which it ended."""
        key = WindowKey(
            observation.deployment_id, observation.endpoint_id, int(observation.ended_at)
        )
        with self._lock:
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = MetricWindow()
            window.add(observation, is_repeat=self._is_repeat(observation))

    def _is_repeat(self, observation: Observation) -> bool:
        """Whether the request's sticky key already has its share of the minute."""
        if not observation.endpoint_id:
            return False
        target, number = (
            (observation.deployment_id, observation.endpoint_id),
            int(observation.ended_at) // 60,
        )
        minute = self._minutes.get(target)
        if minute is None or minute.number != number:
            minute = self._minutes[target] = _MinuteOfKeys(number)
        minute.requests += 1
        key = observation.sticky_key
        if key is None:
            return False
        before = minute.by_key.get(key, 0)
        if before and before + 1 > LARGEST_SHARE * minute.requests:
            return True
        minute.by_key[key] = before + 1
        return False

    @property
    def is_empty(self) -> bool:
        """Whether no window waits to be stored."""
        return not self._windows

    def hand_over(self, store: Callable[[Mapping[WindowKey, MetricWindow]], None]) -> None:
        """Pass all windows to `store`, which merges them into the stored ones; keep them if it raises.

        After the return, everything that was recorded before the call is stored.
        """
        # A second caller waits here, since the windows of the first are stored only when `store` has returned.
        with self._storing:
            with self._lock:
                taken, self._windows = self._windows, {}
            if not taken:
                return
            try:
                store(taken)
            except BaseException:
                with self._lock:
                    for key, window in taken.items():
                        # Requests may have been counted in the same second while `store` ran.
                        window.merge(self._windows.get(key, MetricWindow()))
                        self._windows[key] = window
                raise
            # Only now: what is stored later must not be counted twice, and totals never fall.
            for key, window in taken.items():
                target = (key.deployment_id, key.endpoint_id)
                for total in (self._totals.setdefault(target, MetricWindow()), self._together):
                    total.merge(window)
                    # They would grow without end, and no total needs them.
                    for callers in (
                        total.error_callers,
                        total.cancelled_callers,
                        total.refused_callers,
                        total.sticky_keys,
                    ):
                        callers.clear()

    def totals(self, deployment_ids: Collection[str]) -> Totals:
        """A copy of the counts of these deployments in the windows that were handed over since the start."""
        with self._storing:
            by_target = {
                target: total.copy()
                for target, total in self._totals.items()
                if target[0] in deployment_ids
            }
            return Totals(by_target, self._together.copy())

    def keep_only(self, deployment_ids: Collection[str]) -> None:
        """Forget the totals of all other deployments."""
        with self._storing:
            self._totals = {
                target: total
                for target, total in self._totals.items()
                if target[0] in deployment_ids
            }
        with self._lock:
            self._minutes = {
                target: minute
                for target, minute in self._minutes.items()
                if target[0] in deployment_ids
            }
