"""Which connections are open, and which one has to go when there are too many. Knows no protocol and no clock.

A newcomer is let in at the cost of the connection that has the least claim to stay: first of those that have shown no
valid key the one that came, or was last answered, the longest ago; then the idle one that was used the longest ago.
A request with a valid key that is under way is never cut off. So whoever holds connections without a key
takes nothing from those who have one, even when both come from the same address.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Protocol

from tuneship.host.open_files import ConnectionLimits


class KeepPriority(Enum):
    """What a connection has done to be kept, the weakest first."""

    STRANGER = 1
    """Its last request, if there was one, showed no valid key."""
    IDLE = 2
    """Its last request had a valid key and was answered."""
    BUSY = 3
    """A request with a valid key is under way."""


class OpenConnection(Protocol):
    """What the table has to know of a connection."""

    def cut(self) -> None:
        """End it now, whatever it is doing."""
        ...

    def end_if_overdue(self) -> None:
        """End it if it has waited too long for something."""
        ...

    def grace_s(self) -> float:
        """For so many seconds it should not have to make room yet; 0 when its time is over."""
        ...


class _Group:
    """Connections that are counted together; each claim in the order in which it was made."""

    def __init__(self) -> None:
        self.size = 0
        self._by_claim: dict[KeepPriority, dict[OpenConnection, None]] = {
            one: {} for one in KeepPriority
        }

    def put(self, connection: OpenConnection, claim: KeepPriority) -> None:
        self._by_claim[claim][connection] = None
        self.size += 1

    def take(self, connection: OpenConnection, claim: KeepPriority) -> None:
        del self._by_claim[claim][connection]
        self.size -= 1

    def weakest(self) -> OpenConnection | None:
        for claim in (KeepPriority.STRANGER, KeepPriority.IDLE):
            if (found := next(iter(self._by_claim[claim]), None)) is not None:
                return found
        return None


class OpenConnections:
    """Every open connection of the service; only the event loop calls it."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """None is open."""
        self._limits = limits
        self._all = _Group()
        self._sources: dict[str, _Group] = {}
        self._members: dict[OpenConnection, tuple[str | None, KeepPriority]] = {}
        self.evicted = 0
        """So many were ended to make room, since somebody last asked."""
        self.refused = 0
        """So many newcomers found no room, since somebody last asked."""

    def __iter__(self) -> Iterator[OpenConnection]:
        """Those that are open now, also while some end meanwhile."""
        return iter(tuple(self._members))

    def __len__(self) -> int:
        """How many are open."""
        return self._all.size

    def admit(self, connection: OpenConnection, source: str | None) -> bool:
        """Count a newcomer, after making room for it. False: everybody has a better claim, and it is not counted.

        `source`: the address it counts for; None for a declared proxy, behind which there are many callers.
        """
        full = self._full_for(source)
        if full is not None and not self._end_the_weakest_of(full):
            self.refused += 1
            return False
        self._put(
            connection, source, KeepPriority.STRANGER if source is not None else KeepPriority.IDLE
        )
        return True

    def next_to_go(self, source: str | None) -> OpenConnection | None:
        """Who would be ended to let in a newcomer from a source; None where there is room, or nobody may be ended."""
        full = self._full_for(source)
        return None if full is None else full.weakest()

    def make_room(self) -> None:
        """End the connection with the weakest claim."""
        self._end_the_weakest_of(self._all)

    def _full_for(self, source: str | None) -> _Group | None:
        """The group in which a newcomer has to replace somebody: where both are full, its own address's."""
        own = None if source is None else self._sources.get(source)
        if own is not None and own.size >= self._limits.each:
            return own
        return self._all if self._all.size >= self._limits.together else None

    def claim(self, connection: OpenConnection, claim: KeepPriority) -> None:
        """A connection has a new claim, or the same one again: it comes behind the others that have it."""
        if connection in self._members:
            source = self._members[connection][0]
            self.leave(connection)
            self._put(connection, source, claim)

    def leave(self, connection: OpenConnection) -> None:
        """A connection has ended, or is about to; calling it again does nothing."""
        if connection not in self._members:
            return
        source, claim = self._members.pop(connection)
        self._all.take(connection, claim)
        if source is not None:
            self._sources[source].take(connection, claim)
            if not self._sources[source].size:
                del self._sources[source]

    def _put(self, connection: OpenConnection, source: str | None, claim: KeepPriority) -> None:
        self._members[connection] = source, claim
        self._all.put(connection, claim)
        if source is not None:
            self._sources.setdefault(source, _Group()).put(connection, claim)

    def _end_the_weakest_of(self, group: _Group) -> bool:
        weakest = group.weakest()
        if weakest is None:
            return False
        self.leave(weakest)
        self.evicted += 1
        weakest.cut()
        return True
