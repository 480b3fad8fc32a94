"""What was read, for as long as nothing has been written since.

One service works on a database (`Database.claim`, the lock on the data directory), and each of its writes goes through
`Database.write`: so an answer that followed a write never rests on what was read before it. Traffic asks for the same
few rows again and again, and each reading takes a thread and a millisecond.
"""

from collections.abc import Callable, Hashable
from typing import Any

MOST_KEPT = 1_000


class ReadCache:
    """Values by key. Find on any thread; read on one that may wait."""

    def __init__(self) -> None:
        """Nothing was read."""
        self._kept: dict[Hashable, Any] = {}

    def clear(self) -> None:
        """Something was written: what is being read now is not kept either, it belongs to the dictionary of before."""
        self._kept = {}

    def find(self, key: Hashable) -> Any | None:
        """What `read` gave for the key, if nothing was written since; not to be changed."""
        return self._kept.get(key)

    def read(self, key: Hashable, reading: Callable[[], Any]) -> Any:
        """The value that `reading` returns from the database. None is not kept: callers may ask for what never was."""
        kept = self._kept
        value = reading()
        if value is not None:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            kept[key] = value
        return value
