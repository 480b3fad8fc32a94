"""Collects observations into windows of one second and hands finished counts to a store. Not pure: it remembers.

`record` is called on the event loop, `take` by whoever writes: a lock between them, no I/O here.
"""

import threading
from dataclasses import dataclass

from tuneship.metrics.observations import Observation
from tuneship.metrics.windows import Window


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
        self._windows: dict[WindowKey, Window] = {}

    def record(self, observation: Observation) -> None:
        """Count one request in the second in which it ended."""
        key = WindowKey(
            observation.deployment_id, observation.endpoint_id, int(observation.ended_at)
        )
        with self._lock:
            self._windows.setdefault(key, Window()).add(observation)

    def take(self) -> dict[WindowKey, Window]:
        """All windows since the last call; the caller stores them by merging."""
        with self._lock:
            taken, self._windows = self._windows, {}
        return taken

    def give_back(self, windows: dict[WindowKey, Window]) -> None:
        """What could not be stored is counted again."""
        with self._lock:
            for key, window in windows.items():
                self._windows.setdefault(key, Window()).merge(window)
