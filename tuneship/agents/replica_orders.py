"""Orders of a process for the keeper of replicas, which works while this process leads its cluster."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tuneship.replicas.failed_starts import FailedStarts


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
        return self._failed_of(base).total

    def refusal(self, base: Path) -> str:
        """Why no replica of a base model is started now; empty where one may be."""
        return self._failed_of(base).refusal

    def note_failure(self, base: Path, error: str) -> FailedStarts:
        """Note that a start has failed: the next one is tried after a pause, longer each time. Returns how they go."""
        failed = self.failed[base] = self._failed_of(base).with_failure(error)
        return failed

    def note_success(self, base: Path) -> None:
        """Note that a start has succeeded."""
        self.failed[base] = self._failed_of(base).with_success()

    def _failed_of(self, base: Path) -> FailedStarts:
        return self.failed.get(base, FailedStarts())
