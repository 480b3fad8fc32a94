"""Orders of a process for the keeper of replicas, which works while this process leads its cluster."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Longest pause between failed starts.
MAX_BACKOFF_S = 30.0


@dataclass(frozen=True)
class FailedStarts:
    """Starts of replicas of one base model that have failed."""

    total: int
    in_a_row: int
    error: str
    """Why the last one failed."""
    until: float
    """No start is tried before, by the loop's clock."""


class KeepsReplicas(Protocol):
    """The keeper of the present time of leading."""

    async def unload(self, replica: str, adapter: str) -> None:
        """Unload an adapter from a replica. Raises `ServingError`."""
        ...

    def replace(self, replica: str) -> None:
        """End a replica that hangs; another one is started."""
        ...


class ReplicaOrders:
    """The wanted numbers of replicas, which outlast a time of leading, and how their starts go."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        """`leads`: whether this process decides now."""
        self._leads = leads
        self.wanted: dict[Path, int] = {}
        """Number of replicas by base model."""
        self.failed: dict[Path, FailedStarts] = {}
        self.keeper: KeepsReplicas | None = None
        """Set while this process leads."""
        self.changed = asyncio.Event()
        """Wakes the keeper."""
        self.on_need: Callable[[], None] = lambda: None
        """Called when a request waits for a replica."""

    @property
    def leads(self) -> bool:
        """Whether this process decides now how many replicas there are."""
        return self._leads()

    def want(self, base: Path, replicas: int) -> None:
        """Set the number of replicas of a base model."""
        if self.wanted.get(base) != replicas:
            self.wanted[base] = replicas
            self.changed.set()

    def want_at_least(self, base: Path, replicas: int) -> None:
        """Raise the number of replicas of a base model."""
        self.want(base, max(replicas, self.wanted.get(base, 0)))

    def failures(self, base: Path) -> int:
        """How many starts have failed in all."""
        return self.failed[base].total if base in self.failed else 0

    def refusal(self, base: Path) -> str:
        """Why no replica of a base model is started now; empty where one may be."""
        failed = self.failed.get(base)
        if failed is None or asyncio.get_running_loop().time() >= failed.until:
            return ""
        return failed.error

    def note_failure(self, base: Path, error: str) -> None:
        """Note that a start has failed: the next one is tried after a pause, longer each time."""
        before = self.failed.get(base, FailedStarts(0, 0, "", 0.0))
        pause = min(MAX_BACKOFF_S, 2.0**before.in_a_row)
        until = asyncio.get_running_loop().time() + pause
        self.failed[base] = FailedStarts(before.total + 1, before.in_a_row + 1, error, until)

    def note_success(self, base: Path) -> None:
        """Note that a start has succeeded."""
        if base in self.failed:
            self.failed[base] = FailedStarts(self.failed[base].total, 0, "", 0.0)
