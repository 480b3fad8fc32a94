"""The service's end of the connection to an agent: a `ReplicaLink` over TLS, which notices silence. See `agent.py`."""

import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tuneship.agents.agent_files import send_pieces, sorted_files
from tuneship.agents.agent_protocol import (
    GATEWAY,
    HEARTBEAT_S,
    LEADER,
    PROTOCOL,
    SILENT_HEARTBEATS,
    AgentAddress,
    ServeOrder,
)
from tuneship.agents.agent_sockets import Silence, encoded, is_agent, limit_silence
from tuneship.host.thread_pools import Threads
from tuneship.serving.replica_client import (
    ANSWER_TIMEOUT_S,
    MAX_FRAME_BYTES,
    ReplicaFacts,
    ReplicaLost,
    ReplicaRefused,
    SocketLink,
    read_frame,
)

# A node that is gone answers nothing.
CONNECT_PATIENCE_S = 5.0


@dataclass(frozen=True)
class AgentTiming:
    """How long a service waits for an agent."""

    # While the service connects, an agent that says nothing for this long is lost.
    silence_s: float = SILENT_HEARTBEATS * HEARTBEAT_S
    # Once it is connected, an agent is lost after `SILENT_HEARTBEATS` that did not come.
    heartbeat_s: float = HEARTBEAT_S
    # How long an agent that was ordered to stop, and disconnects at once, is waited for.
    stop_patience_s: float = 2.0


@dataclass(frozen=True)
class AgentAccess:
    """The credentials of a service at its agents."""

    # With a certificate that the agent accepts (`AgentAuthority.client_context`).
    context: ssl.SSLContext
    # The number of the service's turn as leader: an agent obeys the highest that it has seen.
    epoch: int
    # The version of tuneship, which must be that of the node.
    version: str
    timing: AgentTiming = AgentTiming()


async def open_agent(
    address: AgentAddress,
    access: AgentAccess,
    order: ServeOrder | None,
    end: Callable[[], Awaitable[None]] | None = None,
) -> "AgentLink":
    """Connect, and wait until the replica has loaded its base model. Raises `ReplicaRefused`, `ReplicaLost`.

    `order`: the replica that the agent is to run, from its leader; None: it is another one's, who decides when it
    ends. `end`: called when the link is closed.
    """
    reader, writer, prefix = await connected(address, access, GATEWAY if order is None else LEADER)
    with _aborted_on_failure(writer):
        if order is not None:
            writer.write(encoded(order.to_frame()))
        facts = ReplicaFacts(**await answer_of(reader, "ready", access.timing))
    ids = (f"{prefix}:{number}" for number in count())
    timing = access.timing
    return AgentLink(reader, writer, facts, ids, None if order is None else end, timing=timing)


async def connected(
    address: AgentAddress, access: AgentAccess, role: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Connect and say hello; return the streams, and the prefix of all request ids. Raises `ReplicaRefused`,
    `ReplicaLost`.

    It is refused where another program or version answers.
    """
    try:
        async with asyncio.timeout(CONNECT_PATIENCE_S):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=access.context, limit=MAX_FRAME_BYTES
            )
    except OSError as error:  # also the timeout
        raise ReplicaLost(f"the agent cannot be reached: {type(error).__name__}") from error
    with _aborted_on_failure(writer):
        limit_silence(writer)
        if not is_agent(writer.get_extra_info("ssl_object"), address.digest):
            raise ReplicaRefused("another program answers at the agent's address")
        hello = {"op": "hello", "role": role, "epoch": access.epoch, "protocol": PROTOCOL}
        writer.write(encoded(hello))
        greeting = await answer_of(reader, "hello", access.timing)
        if greeting["version"] != access.version:
            text = f"the node has tuneship {greeting['version']}, and the service {access.version}"
            raise ReplicaRefused(text)
        return reader, writer, str(greeting["prefix"])


@contextmanager
def _aborted_on_failure(writer: asyncio.StreamWriter) -> Generator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        writer.transport.abort()
        raise ReplicaLost(f"the agent broke the protocol: {type(error).__name__}") from error
    except BaseException:
        writer.transport.abort()
        raise


async def answer_of(reader: asyncio.StreamReader, name: str, timing: AgentTiming) -> Any:
    """Wait for a message of this name. Raises `ReplicaRefused` and `ReplicaLost`, also for silence."""
    while True:
        try:
            async with asyncio.timeout(timing.silence_s):
                frame = await read_frame(reader)
        except TimeoutError:
            raise ReplicaLost(f"the agent was silent for {timing.silence_s:g} s") from None
        if "refused" in frame:
            raise ReplicaRefused(frame["refused"])
        if "heartbeat" not in frame:
            return frame[name]


class AgentWorker:
    """The replica's process seen through its agent: it ends when the agent's link is closed. Implements `Worker`."""

    def __init__(self, pid: int) -> None:
        """`pid`: process id of the replica on its node."""
        self.pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Return None until it was ended: that an agent ends by itself is known from its link."""
        return self._code

    def stop(self) -> None:
        """Note that it was ended."""
        self._code = -signal.SIGTERM

    def kill(self) -> None:
        """Note that it was ended."""
        self._code = -signal.SIGKILL


class AgentLink(SocketLink):
    """Concurrent requests to the replica of an agent. Obeys `ReplicaLink`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        facts: ReplicaFacts,
        ids: Iterator[str],
        end: Callable[[], Awaitable[None]] | None,
        *,
        timing: AgentTiming,
    ) -> None:
        """Call `open_agent` instead. `end`: called after the agent was ordered to stop; None: it is not."""
        super().__init__(reader, writer, facts, ANSWER_TIMEOUT_S, ids)
        self.worker = AgentWorker(facts.pid)
        self._end = end
        self._timing = timing
        self._silence = Silence(timing.heartbeat_s)
        # Requests of other services that are in flight at the agent, by its last heartbeat.
        self.others = 0
        # Heartbeats that have come.
        self.heartbeats = 0
        # Called with an adapter that another service has unloaded, when a request for it comes back.
        self.on_unloaded: Callable[[str], None] | None = None
        self._threads = Threads("files for an agent", 1)
        self._watch_task = asyncio.create_task(self._watch())

    async def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Send the files of an adapter as they are stored, and load them under a name. Raises `ServingError`.

        Nothing is sent where another service has loaded it.
        """
        if (await self._call("loaded", adapter=adapter))["loaded"]:
            return
        transfer = next(self._ids)
        try:
            for file in await self._threads.run(sorted_files, path):
                head = {"op": "file", "transfer": transfer, "name": file.name}
                await send_pieces(file, self._threads, partial(self._send_piece, head))
        except OSError as error:
            if self._lost is not None:
                raise ReplicaLost(str(self._lost)) from error
            text = f"adapter files cannot be read: {type(error).__name__}"
            raise ReplicaRefused(text) from error
        await self._call("load", adapter=adapter, transfer=transfer, key=key)

    async def _send_piece(self, head: Mapping[str, str], content: str) -> None:
        self._send({**head, "content": content})
        await self._writer.drain()

    async def aclose(self) -> None:
        """Disconnect; its leader also ends the agent. Requests in flight fail with `ReplicaLost`."""
        self._watch_task.cancel()
        if self._end is not None and not self.is_lost:
            self._send({"op": "stop"})
            await asyncio.wait([self._read_task], timeout=self._timing.stop_patience_s)
        with suppress(OSError):  # also one of TLS
            await super().aclose()
        if self._end is not None:
            await self._end()

    async def leave(self) -> None:
        """Disconnect, and let the agent go on."""
        self._end = None
        await self.aclose()

    def _handle(self, frame: dict[str, Any]) -> None:
        self._silence.has_heard = True
        if "heartbeat" in frame:
            self.others, self.heartbeats = frame["heartbeat"]["others"], self.heartbeats + 1
            return
        if "unloaded" in frame and self.on_unloaded is not None:
            self.on_unloaded(frame["unloaded"])
        super()._handle(frame)

    async def _watch(self) -> None:
        """Treat the agent as lost when nothing arrives from it."""
        await self._silence.begun()
        if self._lost is None:
            silence_s = SILENT_HEARTBEATS * self._timing.heartbeat_s
            self._fail_all(ReplicaLost(f"the agent was silent for {silence_s:g} s"))
            self._read_task.cancel()
