"""The protocol of the connection to a replica, `ReplicaLink`, with the adapters and errors that it has.

Another engine (vLLM, a remote host) implements `ReplicaLink` and comes with a `StartReplica` of `replica.py`:
`local_replicas.py` then starts, watches, drains and replaces its replicas like any other.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuneship.serving.replica_client import (
    EmbedRequest,
    GenerateRequest,
    ReplicaLost,
    ServingError,
    TokenStream,
)


@dataclass(frozen=True)
class Adapter:
    """A tuned model's files; the name is the model id."""

    name: str
    path: Path
    # Key that opens sealed files; None for plain ones.
    key: str | None = field(default=None, repr=False)
    # Keeps the files at `path` while a replica reads them, and may have to download them; None where they always are.
    #
    # Entering it raises `OSError` for files that cannot be read, and any other error where they may be had later.
    hold: Callable[[], AbstractContextManager[Path]] | None = field(
        default=None, repr=False, compare=False
    )


class NoReplica(ServingError):
    """No replica answers and none can be started now; a retry a little later may succeed."""


class NotStartedYet(NoReplica):
    """There is no replica, and another process is to start one."""


class FilesAway(NoReplica):
    """The files of an adapter cannot be had now; a retry a little later may succeed."""


class ReplicaLink(Protocol):
    """The connection to one replica that has loaded its base model, e.g. `SocketLink` for our own engine."""

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended: draining waits until there are none."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the replica is lost and must get no more requests."""
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
        """Return when the replica is lost."""
        ...
