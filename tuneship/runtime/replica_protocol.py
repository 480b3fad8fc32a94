"""What the service asks of the replicas of one base model, and what such a group asks of one replica.

Another engine (vLLM, a remote host) obeys `ReplicaLink` and comes with an `OpenReplica`: `replica_set.py` then starts,
watches, spreads, drains and replaces its replicas like any other. Knows no deployment, no HTTP and no process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuneship.runtime.worker_protocol import Worker
from tuneship.serving.replica_client import GenerateRequest, ReplicaLost, ServingError, TokenStream


@dataclass(frozen=True)
class ReplicaEvent:
    """Something about a replica that the logs of its deployments should say. `level`: debug, info, warning, error."""

    level: str
    message: str
    """Without the number of a process: who reads it shares the replica with others."""
    replica: int | None = None
    """Its number in the group; None for one that did not start."""
    is_end: bool = False
    """Whether it is gone."""


@dataclass(frozen=True)
class Adapter:
    """A tuned model's files; the name is the model id."""

    name: str
    path: Path
    key: str | None = field(default=None, repr=False)
    """Opens the files; None for plain ones."""


class NoReplica(ServingError):
    """None answers and none can be started now; another try a little later may find one."""


class ReplicaLink(Protocol):
    """The way to one replica that has loaded its base model. `ReplicaLine` is the one to our own engine."""

    @property
    def in_flight(self) -> int:
        """Generations that have not ended: a replica that leaves waits until there are none."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the replica is gone: nothing is asked of it any more."""
        ...

    async def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Make an adapter directory, whose files `key` opens, available under a name. Raises `ServingError`."""
        ...

    async def unload(self, adapter: str) -> None:
        """Raises `ReplicaRefused` while requests use it."""
        ...

    async def stats(self) -> Mapping[str, int]:
        """At least `waiting` and `rows`; also the probe: it answers in time or the replica hangs."""
        ...

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Start at once; what goes wrong is raised by the iteration."""
        ...

    async def aclose(self) -> None:
        """Hang up; what is under way fails with `ReplicaLost`."""
        ...

    async def wait_lost(self) -> ReplicaLost:
        """Returns when the replica is gone."""
        ...


@dataclass(frozen=True)
class OpenedReplica:
    """A replica that is ready: its process, or whatever can be ended in its place, and the way to it."""

    worker: Worker
    link: ReplicaLink


class OpenReplica(Protocol):
    """How a replica is started."""

    async def __call__(self, base: Path, log: Path) -> OpenedReplica:
        """Returns when its base model is loaded; leaves nothing behind otherwise. Raises `ServingError`, `OSError`.

        Called on the event loop's own thread: the parent-death signal follows the thread that starts a process.
        """
        ...


class ReplicaGroup(Protocol):
    """The replicas of one base model, as the service sees them. A model is an adapter's name, or None for the base."""

    ready_calls: int
    """How often `ready` was called: whoever decides by facts from before a call decides again."""

    @property
    def pids(self) -> Sequence[int]:
        """Processes that can be asked."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that the replicas had queued at the last probe."""
        ...

    @property
    def slots(self) -> int:
        """Requests that one of them runs at once."""
        ...

    def answering(self, model: str | None) -> int:
        """Replicas that have the model and answered the last probe."""
        ...

    def serving(self, model: str | None) -> Sequence[int]:
        """The numbers of the live replicas that have the model and are asked for it."""
        ...

    def take_events(self) -> Sequence[ReplicaEvent]:
        """What happened since the last call."""
        ...

    def resize(self, wanted: int, widths: Mapping[str | None, int]) -> None:
        """Set how many replicas there shall be, and how many of them each model is asked on (all, unless named).

        What is missing is started in the background; what is too many takes no new request and ends when it is idle.
        """
        ...

    async def ready(self, adapter: Adapter | None, width: int = 1) -> None:
        """Start what is missing, load and check the adapter. Raises `ServingError` when then none can answer.

        Fewer than `width` are enough when the others do not start: `resize` goes on trying.
        """
        ...

    async def generate(self, adapter: Adapter | None, request: GenerateRequest) -> TokenStream:
        """Ask the least busy replica that has the adapter; waits for a start only when there is none.

        Raises `NoReplica`, and `ServingError` when the adapter is refused.
        """
        ...

    async def unload(self, adapter: str) -> None:
        """Unload an adapter that nobody needs now; one in use stays."""
        ...

    async def probe(self, patience_s: float) -> None:
        """Ask every live replica something; end those that hang."""
        ...

    async def close(self) -> None:
        """End every replica."""
        ...
