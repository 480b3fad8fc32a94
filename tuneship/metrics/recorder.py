"""Collects observations into windows of one second and hands finished counts to a store. Not pure: it remembers.

`record` is called on the event loop, `hand_over` by whoever stores: a lock between them, no I/O here.
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
    """Whose window, and the second since the epoch at which it starts."""

    deployment_id: str
    endpoint_id: str
    start: int


class Recorder:
    """Windows that are not stored yet."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        self._windows: dict[WindowKey, MetricWindow] = {}
        self._secret = secrets.token_bytes(32)

    def number_of(self, caller: str) -> int:
        """32 bits in place of a caller. The secret never leaves this process, so nobody can find the caller by trying.

        After a restart the same caller has another number.
        """
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
        """Give all windows to `store`, which adds them to what it has; when it raises they are kept.

        One hand-over at a time: whoever comes back from here finds stored what was recorded before.
        """
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
                        window.merge(self._windows.get(key, MetricWindow()))
                        self._windows[key] = window
                raise
