"""The table of open connections, which ends one when there are too many. Knows no protocol and no clock.

A new connection takes the place of the keyless one that came or was answered the longest ago, so callers without a key
take nothing from those with one; without any keyless one, of the idle connection that was used the longest ago. A
request in flight with a valid key is never cut off.
"""

from collections.abc import Iterator
from typing import Protocol


class OpenConnection(Protocol):
    """A connection as the table sees it."""

    def cut(self) -> None:
        """End it now, whatever it is doing."""
        ...

    def end_if_overdue(self) -> None:
        """End it if it has waited too long for something."""
        ...


class OpenConnections:
    """Every open connection of the service. Used by the event loop only."""

    def __init__(self, limit: int) -> None:
        """`limit`: the number of connections that may be open at the same time."""
        self._limit = limit
        self._all = set[OpenConnection]()
        # Those whose last request, if there was one, had no valid key; the first to be ended stands first.
        self._keyless = dict[OpenConnection, None]()
        # Those whose last request had a valid key and was answered, in the same order.
        self._idle = dict[OpenConnection, None]()
        # Connections ended to make room since the last report.
        self.evicted = 0
        # New connections that found no room since the last report.
        self.refused = 0

    def __iter__(self) -> Iterator[OpenConnection]:
        """The connections that are open now; some may end during the iteration."""
        return iter(tuple(self._all))

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._all)

    def admit(self, connection: OpenConnection, *, has_key: bool) -> bool:
        """Count a new connection, ending another one if there are too many; false if none of them may be ended."""
        if len(self._all) >= self._limit and not self.make_room():
            self.refused += 1
            return False
        self._all.add(connection)
        self.release(connection, has_key=has_key)
        return True

    def make_room(self) -> bool:
        """End the connection that is the first to be ended; false if each has a request with a valid key in flight."""
        first = next(iter(self._keyless or self._idle), None)
        if first is None:
            return False
        self.leave(first)
        self.evicted += 1
        first.cut()
        return True

    def protect(self, connection: OpenConnection) -> None:
        """Keep a connection until `release`: it has a request with a valid key in flight."""
        self._keyless.pop(connection, None)
        self._idle.pop(connection, None)

    def release(self, connection: OpenConnection, *, has_key: bool) -> None:
        """Let a connection be ended to make room, after all others of its kind."""
        self.protect(connection)
        if connection in self._all:
            (self._idle if has_key else self._keyless)[connection] = None

    def leave(self, connection: OpenConnection) -> None:
        """Remove a connection that has ended or is about to; calling it again does nothing."""
        self.protect(connection)
        self._all.discard(connection)
