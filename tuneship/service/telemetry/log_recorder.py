"""Buffers the lines of deployments' logs, so that no request waits for the log. No I/O here.

`add` is called on the event loop, `hand_over` by the supervisor at its tick and by readers before they read.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

from tuneship.contract.common import count
from tuneship.store.records.deployment_logs import LogEntry

# Lines kept between two ticks; further lines are only counted.
MAX_WAITING = 1000


class LogRecorder:
    """Keeps a bounded number of lines until they are stored."""

    def __init__(self) -> None:
        """Start without lines."""
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        self._entries: list[LogEntry] = []
        self._dropped: Counter[str] = Counter()

    def add(self, *entries: LogEntry) -> None:
        """Keep lines, or only count them when too many wait."""
        with self._lock:
            self._keep(entries)

    def _keep(self, entries: Sequence[LogEntry]) -> None:
        room = max(0, MAX_WAITING - len(self._entries))
        self._entries += entries[:room]
        self._dropped.update(entry.deployment_id for entry in entries[room:])

    @property
    def is_empty(self) -> bool:
        """Whether no line waits to be stored."""
        return not self._entries

    def hand_over(self, store: Callable[[Sequence[LogEntry]], None], now: datetime) -> None:
        """Pass all lines to `store`; when it raises they are kept. One hand-over at a time."""
        with self._storing:
            with self._lock:
                taken, self._entries = self._entries, []
                dropped, self._dropped = self._dropped, Counter()
            if not taken:
                return
            notes = [
                LogEntry(
                    name,
                    now,
                    "warning",
                    "supervisor",
                    f"{count(number, 'line was', 'lines were')} not kept",
                )
                for name, number in dropped.items()
            ]
            try:
                store([*taken, *notes])
            except BaseException:
                with self._lock:
                    newer, self._entries = self._entries, taken
                    self._keep(newer)
                    self._dropped.update(dropped)
                raise
