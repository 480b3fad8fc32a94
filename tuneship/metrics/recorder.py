"""Collects observations in memory, in windows of one second, and hands them to a store. No I/O.

`record` is called on the event loop and `hand_over` in the thread that stores, with a lock between them.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tuneship.metrics.observations import Observation
from tuneship.metrics.windows import MetricWindow


@dataclass(frozen=True)
class WindowKey:
    """The deployment and endpoint of a window, and its start in whole seconds since the epoch."""

    deployment_id: str
    endpoint_id: str
    start: int


@dataclass(frozen=True)
class Totals:
    """The counts since the service started, of some deployments by endpoint, and of all together."""

    # By deployment id and endpoint id; the second is empty for direct calls.
    by_target: Mapping[tuple[str, str], MetricWindow]
    # Also holds the counts of deployments that are forgotten by now.
    together: MetricWindow


class Recorder:
    """The windows that are not stored yet, and the totals of those that are."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        self._windows: dict[WindowKey, MetricWindow] = {}
        self._totals: dict[tuple[str, str], MetricWindow] = {}
        self._together = MetricWindow()
        self._secret = secrets.token_bytes(32)

    def number_of(self, caller: str) -> int:
        """A hash of 32 bits for a caller; after a restart the same caller has another one."""
        # Keyed with a secret that never leaves this process, so nobody can find the caller by trying names.
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
            window.add(observation)

    def hand_over(self, store: Callable[[Mapping[WindowKey, MetricWindow]], None]) -> None:
        """Pass all windows to `store`, which adds them to the stored ones; when it raises they are kept.

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
                    # A set that grows without end, and no total needs it.
                    total.error_callers.clear()

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
