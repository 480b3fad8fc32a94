"""The protocol of a place where workers run; `worker_processes.py` is the default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuneship.runtime.landlock import Places


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to start: a module of ours with arguments."""

    module: str
    arguments: tuple[str, ...]
    log: Path
    """Where its standard output and error go."""
    threads: int = 0
    """Compute threads; 0 leaves the choice to the worker."""
    inherited: tuple[int, ...] = field(default=())
    """File descriptors that stay open in the worker."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables beside the few that every worker has, e.g. a secret, which arguments would show to everybody."""
    places: Places = field(default_factory=Places)
    """Files and folders that it works with: a worker that is isolated reaches no other ones of its user."""
    needs_network: bool = False
    """A program of others that speaks over sockets of its own and is not isolated; ours need none, and have none."""


class Worker(Protocol):
    """A started worker."""

    @property
    def pid(self) -> int:
        """The operating system's number of it."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        ...

    def stop(self) -> None:
        """Ask it to end (SIGTERM to its process group)."""
        ...

    def kill(self) -> None:
        """End it and its children at once."""
        ...


class Runtime(Protocol):
    """A place where workers run."""

    def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker. Raises `OSError` when that is impossible."""
        ...
