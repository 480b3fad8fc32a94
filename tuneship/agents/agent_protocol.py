"""Messages between services and the agent of a replica, over TLS: those of `replica_client.py`, and a few more.

Like those, they are JSON objects, one a line. A service says `hello` (role, epoch, protocol) and learns with which
prefix the ids of its requests must begin, or that it is `refused`. A `leader`, of whom the one with the highest epoch
decides, orders the agent to `serve` a base model, to `unload` an adapter, and to `stop`; a `gateway` only asks. When
the replica is ready, all hear it. The agent sends a `heartbeat` every second, however long a step of the model takes,
with the number of requests of the `others`. Whether an adapter is `loaded` can be asked; its files come in pieces
(`file`) before its `load`. A request for one that the leader has `unloaded` meanwhile comes back as lost.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from tuneship.replicas.engine_kinds import VllmServer

PROTOCOL = 1
LEADER, GATEWAY = "leader", "gateway"
HEARTBEAT_S = 1.0
# An agent is lost after this many heartbeats without a message.
SILENT_HEARTBEATS = 5
# The kernel ends a connection when nobody confirms what it has sent for this long.
USER_TIMEOUT_MS = 5000
# Longest message to an agent: a prompt of a million tokens has fewer bytes.
MAX_REQUEST_BYTES = 64 << 20
# Piece of a file; other messages go between two pieces.
PIECE_BYTES = 256 << 10
_READY = re.compile(r"^ready (?P<host>\S+):(?P<port>\d+) (?P<digest>[0-9a-f]{64})$", re.MULTILINE)


class CannotServe(Exception):
    """The node cannot run what was ordered; the text says why."""


class NotUnderstood(Exception):
    """A service broke the protocol; the agent closes its connection."""


@dataclass(frozen=True)
class AgentAddress:
    """The place where an agent listens, and the SHA-256 of the certificate that it will show there."""

    host: str
    port: int
    digest: str

    def ready_line(self) -> str:
        """The line that an agent prints when it listens."""
        return f"ready {self.host}:{self.port} {self.digest}"

    @classmethod
    def said_in(cls, text: str) -> Self | None:
        """The address in an agent's output; None while the agent has not printed one."""
        found = _READY.search(text)
        return None if found is None else cls(found["host"], int(found["port"]), found["digest"])


@dataclass(frozen=True)
class ServeOrder:
    """The replica that an agent is to run."""

    # Directory of the base model, the same on every node.
    base: str
    # Digest of its files (`base_digest.py`): another model under that path is refused.
    digest: str
    # Whether a replica that cannot be isolated must not start; otherwise it is isolated as far as possible.
    isolated: bool
    # Size limit of the KV cache; 0: a share of what is free on the node.
    cache_bytes: int
    # The number of replicas that share the node's free memory at most.
    processes: int
    # Number format of the weights; None: the replica chooses.
    weights: str | None
    # The server that serves it; None: our own engine.
    vllm: VllmServer | None = None

    def to_frame(self) -> dict[str, Any]:
        """The order as a message."""
        return {"op": "serve", **asdict(self)}

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> Self:
        """Read the message. Raises `KeyError` and `TypeError`."""
        values = {name: value for name, value in frame.items() if name != "op"}
        if (vllm := values["vllm"]) is not None:
            command, options = tuple(vllm["command"]), tuple(vllm["options"])
            values["vllm"] = VllmServer(command, options, vllm["patience_s"])
        return cls(**values)
