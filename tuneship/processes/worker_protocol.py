"""The protocols of workers and of what starts them; `worker_processes.py` is the implementation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuneship.isolation.landlock import Places


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to start: one of our modules with arguments."""

    module: str
    arguments: tuple[str, ...]
    # File for its standard output and error.
    log: Path
    # Compute threads; 0 leaves the choice to the worker.
    threads: int = 0
    # File descriptors that stay open in the worker.
    inherited: tuple[int, ...] = field(default=())
    # More variables, e.g. a secret, which arguments would show to other users of the machine.
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    # Files and folders that it may use: an isolated worker reaches no others of its user.
    places: Places = field(default_factory=Places)
    # The most memory of its own that it may allocate, as far as the host enforces it; 0: no limit.
    memory_bytes: int = 0
    # Whether it is a third-party program with sockets of its own, which is not isolated.
    needs_network: bool = False


class Worker(Protocol):
    """A started worker."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    def exit_code(self) -> int | None:
        """Return the exit code: None while it runs, negative if a signal ended it."""
        ...

    def stop(self) -> None:
        """Ask it to end (SIGTERM to its process group)."""
        ...

    def kill(self) -> None:
        """End it and its children at once."""
        ...


class Runtime(Protocol):
    """Starts workers."""

    def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker. Raises `OSError` when that is impossible."""
        ...

    def preload(self, module: str) -> None:
        """Prepare for workers of this module, so that they start sooner. Nothing happens where that is impossible."""
        ...
