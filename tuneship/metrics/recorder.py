"""Collects observations in memory, in windows of one second, and hands them to a store. No I/O.

`record` is called on the event loop and `hand_over` in the thread that stores, with a lock between them.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuneship.metrics.observations import Observation
from tuneship.metrics.windows import MetricWindow


@dataclass(frozen=True)
class WindowKey:
    """The deployment and endpoint of a window, and its start in whole seconds since the epoch."""

    deployment_id: str
    endpoint_id: str
    start: int


class Recorder:
    """The windows that are not stored yet."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        self._windows: dict[WindowKey, MetricWindow] = {}
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
