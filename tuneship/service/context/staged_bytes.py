"""Counts the bytes of files that are still arriving, of each client and for the disk.

It counts those of this process: each member of a cluster counts the uploads that it receives.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

# Bytes of an upload between two checks of the free space on the disk.
SPACE_CHECK_BYTES = 64 << 20


@dataclass(eq=False)
class StagedCount:
    """The announced and the received bytes of one file."""

    announced: int = 0
    arrived: int = 0

    @property
    def bytes(self) -> int:
        return max(self.announced, self.arrived)


class StagedBytes:
    """The open counts of all clients. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[StagedCount, str] = {}

    @contextmanager
    def counting(self, client_id: str, count: StagedCount) -> Generator[None]:
        """Let a file count against its client, within the block or until `close`."""
        with self._lock:
            self._open[count] = client_id
        try:
            yield
        finally:
            self.close(count)

    def close(self, count: StagedCount) -> None:
        """Count a file no longer. A second call does nothing."""
        with self._lock:
            self._open.pop(count, None)

    def raise_to(self, count: StagedCount, room: int, *, announced: int, arrived: int) -> bool:
        """Count more bytes; false, and the file counts nothing, where all of its client's would exceed `room`."""
        with self._lock:
            client_id = self._open.get(count)
            others = sum(
                one.bytes
                for one, owner in self._open.items()
                if owner == client_id and one is not count
            )
            count.announced, count.arrived = announced, arrived
            if others + count.bytes <= room:
                return True
            count.announced = count.arrived = 0
            return False

    def coming(self, count: StagedCount) -> int:
        """Bytes that still need room on the disk: the rest of this file, and what others receive before their next
        check.

        A whole announcement of somebody else would let a tenant take the disk without sending a byte.
        """
        with self._lock:
            rests = {one: max(0, one.announced - one.arrived) for one in self._open}
        own = rests.pop(count, 0)
        return own + sum(min(rest, SPACE_CHECK_BYTES) for rest in rests.values())
