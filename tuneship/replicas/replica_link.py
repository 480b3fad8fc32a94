"""The protocols of replicas: `ReplicaGroup` for the service, `ReplicaLink` and `OpenReplica` for engines.

Another engine (vLLM, a remote host) implements `ReplicaLink` and comes with an `OpenReplica`: `local_replicas.py` then
starts, watches, drains and replaces its replicas like any other. Knows no deployment, no HTTP and no process.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuneship.processes.worker_protocol import Worker
from tuneship.serving.replica_client import (
    EmbedRequest,
    GenerateRequest,
    ReplicaLost,
    ServingError,
    TokenStream,
)


@dataclass(frozen=True)
class ReplicaEvent:
    """An event of a replica for the logs of its deployments."""

    level: str
    """`debug`, `info`, `warning` or `error`."""
    message: str
    """The text, without a process id: the reader shares the replica with others."""
    replica: int | None = None
    """Number of the replica in its group; None for one that did not start."""
    is_end: bool = False
    """Whether the replica is gone."""


@dataclass(frozen=True)
class ReplicaReading:
    """A live replica with the counts of its last health check, as the engine names them."""

    number: int
    pid: int | None
    """Process id; None on another machine."""
    stats: Mapping[str, int]


@dataclass(frozen=True)
class Adapter:
    """A tuned model's files; the name is the model id."""

    name: str
    path: Path
    key: str | None = field(default=None, repr=False)
    """Key that opens sealed files; None for plain ones."""
    hold: Callable[[], AbstractContextManager[Path]] | None = field(
        default=None, repr=False, compare=False
    )
    """Keeps the files at `path` while a replica reads them, and may have to download them; None where they always are.

    Entering it raises `OSError` for files that cannot be read, and any other error where they may be had later.
    """


class NoReplica(ServingError):
    """No replica answers and none can be started now; a retry a little later may succeed."""


class NotStartedYet(NoReplica):
    """There is no replica, and another process is to start one."""


class FilesAway(NoReplica):
    """The files of an adapter cannot be had now; a retry a little later may succeed."""


class ReplicaLink(Protocol):
    """The connection to one replica that has loaded its base model, e.g. `ReplicaLine` for our own engine."""

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended: draining waits until there are none."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the replica is gone and gets no more requests."""
        ...

    async def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Load the adapter directory, whose files `key` opens, under a name. Raises `ServingError`."""
        ...

    async def unload(self, adapter: str) -> None:
        """Unload an adapter. Raises `ReplicaRefused` while requests use it."""
        ...

    async def stats(self) -> Mapping[str, int]:
        """Return counts, at least `waiting` and `rows` (slots); it is also the health check."""
        ...

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Send a request at once and return its stream, whose iteration raises errors."""
        ...

    async def embed(self, request: EmbedRequest) -> list[str]:
        """Embed texts: one vector each, as float32 numbers in Base64. Raises `ServingError`.

        An engine that cannot raises `ReplicaRefused`.
        """
        ...

    async def aclose(self) -> None:
        """Disconnect; requests in flight fail with `ReplicaLost`."""
        ...

    async def wait_lost(self) -> ReplicaLost:
        """Return when the replica is gone."""
        ...


@dataclass(frozen=True)
class OpenedReplica:
    """A replica that is ready: its process, or whatever can be ended in place of one, and the link to it."""

    worker: Worker
    link: ReplicaLink


class OpenReplica(Protocol):
    """Starts a replica of an engine."""

    async def __call__(self, base: Path, log: Path) -> OpenedReplica:
        """Return when its base model is loaded; leave nothing behind otherwise. Raises `ServingError`, `OSError`.

        Called on the event loop's own thread: the parent-death signal follows the thread that starts a process.
        """
        ...


class ReplicaGroup(Protocol):
    """All replicas of one base model, as the service uses them.

    `model` arguments are an adapter's name, or None for the base model.
    """

    ready_calls: int
    """Number of calls of `ready`: decisions based on facts from before a call have to be made again."""
    is_here: bool
    """Whether the replicas are processes of this machine, whose memory limits their number."""
    is_own: bool
    """Whether they serve this process alone, and no other members of a cluster."""

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the live replicas on this machine."""
        ...

    @property
    def readings(self) -> Sequence[ReplicaReading]:
        """The live replicas. May be read from any thread."""
        ...

    @property
    def waiting(self) -> int:
        """Number of requests that the replicas had queued at the last health check."""
        ...

    @property
    def slots(self) -> int:
        """Number of requests that one replica runs at once."""
        ...

    def answering(self, model: str | None) -> int:
        """Number of replicas that serve the model and passed the last health check."""
        ...

    def serving(self, model: str | None) -> Sequence[int]:
        """Numbers of the live replicas that have the model and get its requests."""
        ...

    def take_events(self) -> Sequence[ReplicaEvent]:
        """Return the events since the last call."""
        ...

    def resize(self, wanted: int, widths: Mapping[str | None, int]) -> None:
        """Set the number of replicas, and on how many of them each model is served (all, unless named).

        Missing replicas are started in the background; surplus ones are drained and ended.
        """
        ...

    async def ready(self, adapter: Adapter | None, width: int = 1) -> None:
        """Start missing replicas, load and check the adapter. Raises `ServingError` if then none can serve it.

        Fewer replicas than `width` are enough if the others do not start: `resize` goes on trying.
        """
        ...

    async def generate(self, adapter: Adapter | None, request: GenerateRequest) -> TokenStream:
        """Send a request to the least busy replica with the adapter; wait for a start only if there is none.

        Raises `NoReplica`, and `ServingError` when the adapter is refused.
        """
        ...

    async def embed(self, adapter: Adapter | None, request: EmbedRequest) -> list[str]:
        """Embed texts with one replica: a vector each, as float32 numbers in Base64. Raises as `generate` does."""
        ...

    async def unload(self, adapter: str) -> None:
        """Unload an adapter that no deployment needs; one in use stays."""
        ...

    async def probe(self, patience_s: float) -> None:
        """Run a health check of every live replica, and end those that hang."""
        ...

    async def close(self) -> None:
        """End every replica."""
        ...
