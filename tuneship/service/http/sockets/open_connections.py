"""The table of open connections, which chooses the one to end when there are too many. Knows no protocol and no clock.

A new connection replaces the one with the lowest priority: first, of those without a valid key, the one that came or
was answered the longest ago; then the idle one that was used the longest ago. A request in flight with a valid key is
never cut off. So connections without a key take nothing from those with one, even from the same address.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Protocol

from tuneship.host.open_files import ConnectionLimits


class KeepPriority(Enum):
    """The right of a connection to stay open, the lowest first."""

    # Its last request, if there was one, had no valid key.
    STRANGER = 1
    # Its last request had a valid key and was answered.
    IDLE = 2
    # A request with a valid key is in flight.
    BUSY = 3


class OpenConnection(Protocol):
    """A connection as the table sees it."""

    def cut(self) -> None:
        """End it now, whatever it is doing."""
        ...

    def end_if_overdue(self) -> None:
        """End it if it has waited too long for something."""
        ...

    def grace_s(self) -> float:
        """Seconds until it may be ended to make room; 0 when it may be ended now."""
        ...


class _Group:
    """Connections that are counted together, by priority and in the order in which they got it."""

    def __init__(self) -> None:
        self.size = 0
        self._by_priority: dict[KeepPriority, dict[OpenConnection, None]] = {
            priority: {} for priority in KeepPriority
        }

    def add(self, connection: OpenConnection, priority: KeepPriority) -> None:
        self._by_priority[priority][connection] = None
        self.size += 1

    def remove(self, connection: OpenConnection, priority: KeepPriority) -> None:
        del self._by_priority[priority][connection]
        self.size -= 1

    def lowest(self) -> OpenConnection | None:
        for priority in (KeepPriority.STRANGER, KeepPriority.IDLE):
            if (connection := next(iter(self._by_priority[priority]), None)) is not None:
                return connection
        return None


class OpenConnections:
    """Every open connection of the service. Used by the event loop only."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """Start without connections."""
        self._limits = limits
        self._all = _Group()
        self._sources: dict[str, _Group] = {}
        self._members: dict[OpenConnection, tuple[str | None, KeepPriority]] = {}
        # Connections ended to make room since the last report.
        self.evicted = 0
        # New connections that found no room since the last report.
        self.refused = 0

    def __iter__(self) -> Iterator[OpenConnection]:
        """The connections that are open now; some may end during the iteration."""
        return iter(tuple(self._members))

    def __len__(self) -> int:
        """The number of open connections."""
        return self._all.size

    def admit(self, connection: OpenConnection, source: str | None) -> bool:
        """Count a new connection, after making room for it; false, and not counted, when none may be ended for it.

        `source`: the address it counts for; None for a declared proxy, behind which there are many callers.
        """
        full = self._full_for(source)
        if full is not None and not self._end_lowest_of(full):
            self.refused += 1
            return False
        priority = KeepPriority.STRANGER if source is not None else KeepPriority.IDLE
        self._add(connection, source, priority)
        return True

    def next_to_go(self, source: str | None) -> OpenConnection | None:
        """The connection that a new one from `source` would replace; None if there is room, or none may be ended."""
        full = self._full_for(source)
        return None if full is None else full.lowest()

    def make_room(self) -> None:
        """End the connection with the lowest priority."""
        self._end_lowest_of(self._all)

    def _full_for(self, source: str | None) -> _Group | None:
        """The full group in which a new connection must replace one: that of its own address if both are full."""
        own = None if source is None else self._sources.get(source)
        if own is not None and own.size >= self._limits.each:
            return own
        return self._all if self._all.size >= self._limits.together else None

    def set_priority(self, connection: OpenConnection, priority: KeepPriority) -> None:
        """Move a connection behind all others of this priority, also when it had the priority before."""
        if connection in self._members:
            source = self._members[connection][0]
            self.leave(connection)
            self._add(connection, source, priority)

    def leave(self, connection: OpenConnection) -> None:
        """Remove a connection that has ended or is about to; calling it again does nothing."""
        if connection not in self._members:
            return
        source, priority = self._members.pop(connection)
        self._all.remove(connection, priority)
        if source is not None:
            self._sources[source].remove(connection, priority)
            if not self._sources[source].size:
                del self._sources[source]

    def _add(self, connection: OpenConnection, source: str | None, priority: KeepPriority) -> None:
        self._members[connection] = source, priority
        self._all.add(connection, priority)
        if source is not None:
            self._sources.setdefault(source, _Group()).add(connection, priority)

    def _end_lowest_of(self, group: _Group) -> bool:
        lowest = group.lowest()
        if lowest is None:
            return False
        self.leave(lowest)
        self.evicted += 1
        lowest.cut()
        return True
