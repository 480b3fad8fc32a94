"""Rate limits that all members of a cluster keep together, by chunks of windows (`store/cluster/rate_windows.py`).

Failed authentications and refusals are counted by each member for itself.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from tuneship.host.thread_pools import Threads
from tuneship.service.http.rate_limits import MOST_KEPT, RateLimits, RateWindow
from tuneship.store.cluster import rate_windows
from tuneship.store.database.database import Database

# Statements of this kind at the same time.
TAKERS = 2


@dataclass
class _Chunk:
    """The requests that this member may still pass in one window of one caller."""

    reset: int
    # Requests that were taken and not passed yet.
    own: int = 0
    # Requests that nobody had taken when this member took last; None before that.
    left: int | None = None
    taking: "asyncio.Task[None] | None" = None


class SharedRateLimits(RateLimits):
    """Spends this member's chunks of the windows that all members share."""

    def __init__(
        self, control: int, generate: int, clock: Callable[[], datetime], database: Database
    ) -> None:
        """As `RateLimits`; `clock` must be the same for all members."""
        super().__init__(control, generate, clock)
        self._database = database
        self._chunks: dict[tuple[str, str], _Chunk] = {}
        self._threads = Threads("rate windows", TAKERS)

    async def counted(self, client_id: str, kind: str) -> RateWindow | None:
        """Count a request of `kind`, after taking a chunk if this member has none. Raises SQLAlchemy's errors."""
        if not self._limits[kind]:
            return None
        while True:
            chunk, window = self._state(client_id, kind)
            if chunk.own:
                chunk.own -= 1
                return replace(window, remaining=window.remaining - 1)
            if window.exceeded:
                return window
            await asyncio.shield(self._taking(chunk, client_id, kind))

    def take_spare(self, client_id: str) -> bool:
        """Count a generation that nobody waits for, unless the client has used half of its limit; False if it has.

        False, too, while a chunk is being taken.
        """
        limit = self._limits["generate"]
        if not limit:
            return True
        chunk, window = self._state(client_id, "generate")
        if window.remaining <= limit // 2:
            return False
        if not chunk.own:
            self._taking(chunk, client_id, "generate")
            return False
        chunk.own -= 1
        return True

    def _state(self, client_id: str, kind: str) -> tuple[_Chunk, RateWindow]:
        limit = self._limits[kind]
        reset, retry_after = self._end(kind, client_id)
        chunk = self._chunks.get((kind, client_id))
        if chunk is None or chunk.reset != reset:
            if len(self._chunks) >= MOST_KEPT:
                # Those of past windows, and what is lost of others is only passed later or not at all.
                self._chunks.clear()
            self._chunks[kind, client_id] = chunk = _Chunk(reset)
        remaining = limit if chunk.left is None else chunk.own + chunk.left
        return chunk, RateWindow(limit, remaining, reset, remaining == 0, retry_after)

    def _taking(self, chunk: _Chunk, client_id: str, kind: str) -> "asyncio.Task[None]":
        """Take a chunk, once for all waiting requests."""
        if chunk.taking is None or chunk.taking.done():
            chunk.taking = asyncio.create_task(self._take(chunk, client_id, kind))
        return chunk.taking

    async def _take(self, chunk: _Chunk, client_id: str, kind: str) -> None:
        limit = self._limits[kind]

        def take() -> tuple[int, int]:
            with self._database.write_beside(first=True) as connection:
                return rate_windows.take(connection, client_id, kind, chunk.reset, limit)

        taken, chunk.left = await self._threads.run(take)
        chunk.own += taken
