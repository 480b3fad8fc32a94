"""Caches values read from the database until the next write.

Only one service works on a database (`Database.claim`, the lock on the data directory), and all of its writes go
through `Database.write`, so a cached value is never older than the last write. Generation reads the same few rows for
every request, and each read takes a thread and about a millisecond.

In a cluster others write, too. There a value is never older than the last write of this process, nor older than
`MAX_AGE_S`, and mostly younger: news of the others' writes drops it.
"""

import time
from collections.abc import Callable, Hashable
from typing import Any

MAX_VALUES = 1_000
MAX_AGE_S = 1.0


class ReadCache:
    """Cached values by key. `find` never blocks; call `read` on a thread that may wait for the database."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        """Start empty; a value beyond `max_values` clears the others."""
        self._max_values = max_values
        self._kept: dict[Hashable, Any] = {}

    def clear(self) -> None:
        """Drop every value, because something was written."""
        # A `read` in flight stores into the old dictionary, so its value, which may be stale, is dropped too.
        self._kept = {}

    def find(self, key: Hashable) -> Any | None:
        """The cached value, or None; callers must not change it."""
        return self._kept.get(key)

    def read(self, key: Hashable, reading: Callable[[], Any]) -> Any:
        """Call `reading`, and cache and return its value.

        None is not cached, so that requests for ids that do not exist cannot fill the cache.
        """
        kept = self._kept
        value = reading()
        if value is not None:
            # Which value is needed least is not worth keeping count of: the next reads fill the cache again.
            if len(kept) >= self._max_values:
                kept.clear()
            kept[key] = value
        return value


class SharedReadCache(ReadCache):
    """The cache of one of several processes that write."""

    def __init__(
        self, publish: Callable[[], None], elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty; `publish` is called at each write, for the others."""
        super().__init__()
        self._publish = publish
        self._elapsed = elapsed

    def clear(self) -> None:
        """Drop every value, because this process has written something, and let the others know."""
        super().clear()
        self._publish()

    def drop(self) -> None:
        """Drop every value, because another process has written something."""
        super().clear()

    def find(self, key: Hashable) -> Any | None:
        """The cached value if it is young enough, or None; callers must not change it."""
        found = super().find(key)
        if found is None or self._elapsed() - found[0] >= MAX_AGE_S:
            return None
        return found[1]

    def read(self, key: Hashable, reading: Callable[[], Any]) -> Any:
        """Call `reading`, and cache and return its value, which is as old as the begin of the call."""
        began = self._elapsed()

        def dated() -> tuple[float, Any] | None:
            value = reading()
            return None if value is None else (began, value)

        found = super().read(key, dated)
        return None if found is None else found[1]
