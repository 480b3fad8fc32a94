"""Lines of deployments' logs that are not stored yet, so that no request waits for the log. No I/O here.

`add` is called on the event loop, `hand_over` by whoever stores: the supervisor at its tick, a reader before it reads.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

from tuneship.store.deployment_logs import LogEntry

# Between two ticks; further lines are only counted.
MOST_WAITING = 1000


class LogRecorder:
    """Keeps lines between two hand-overs, in a bounded number."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        self._entries: list[LogEntry] = []
        self._dropped: Counter[str] = Counter()

    def add(self, *entries: LogEntry) -> None:
        """Keep lines, or only their number when too many wait."""
        with self._lock:
            self._keep(entries)

    def _keep(self, entries: Sequence[LogEntry]) -> None:
        room = max(0, MOST_WAITING - len(self._entries))
        self._entries += entries[:room]
        self._dropped.update(one.deployment_id for one in entries[room:])

    def hand_over(self, store: Callable[[Sequence[LogEntry]], None], now: datetime) -> None:
        """Give all lines to `store`; when it raises they are kept. One hand-over at a time."""
        with self._storing:
            with self._lock:
                taken, self._entries = self._entries, []
                dropped, self._dropped = self._dropped, Counter()
            if not taken:
                return
            told = [
                LogEntry(name, now, "warning", "supervisor", f"{number} lines were not kept")
                for name, number in dropped.items()
            ]
            try:
                store([*taken, *told])
            except BaseException:
                with self._lock:
                    since, self._entries = self._entries, taken
                    self._keep(since)
                    self._dropped.update(dropped)
                raise
