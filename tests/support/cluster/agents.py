"""An agent in the test's own event loop, whose replica is played, and connections to it over real TLS."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.service.engines import PlayedEngines
from tests.support.waiting import PATIENCE_S, until_disconnected
from tuneship.agents.agent import AgentConnections
from tuneship.agents.agent_link import AgentAccess, AgentLink, AgentTiming, open_agent
from tuneship.agents.agent_protocol import MAX_REQUEST_BYTES, AgentAddress, ServeOrder
from tuneship.agents.agent_relay import AgentRelay
from tuneship.agents.agent_sockets import encoded
from tuneship.agents.certificates import AgentAuthority, agent_context
from tuneship.replicas.serving_process import ServingOptions, start_serving

AUTHORITY = AgentAuthority(b"s" * 32)
VERSION = "1.2.3"
ORDER = ServeOrder(base="base", digest="", isolated=False, cache_bytes=0, processes=1, weights=None)


PATIENT = AgentTiming()
# Expects a heartbeat every 20 milliseconds, and leaves an agent its time to connect: others use the processor, too.
HURRIED = AgentTiming(silence_s=PATIENCE_S, heartbeat_s=0.02)


def access(epoch: int = 1, version: str = VERSION, timing: AgentTiming = PATIENT) -> AgentAccess:
    return AgentAccess(AUTHORITY.client_context(datetime.now(UTC)), epoch, version, timing)


@dataclass
class PlayedAgent:
    """An agent that listens."""

    relay: AgentRelay
    address: AgentAddress
    folder: Path
    # The word of each link of a leader that was closed.
    ended: list[str] = field(default_factory=list[str])

    async def lead(
        self, epoch: int = 1, order: ServeOrder = ORDER, timing: AgentTiming = PATIENT
    ) -> AgentLink:
        async def end() -> None:
            self.ended.append(f"epoch {epoch}")

        return await open_agent(self.address, access(epoch, timing=timing), order, end)

    async def attach(self) -> AgentLink:
        return await open_agent(self.address, access(), None)

    async def speak(self, *frames: dict[str, Any]) -> "list[dict[str, Any]]":
        """Send messages by hand; return what comes until the agent disconnects."""
        reader, writer = await asyncio.open_connection(
            self.address.host, self.address.port, ssl=access().context
        )
        for frame in frames:
            writer.write(encoded(frame))
        answers = list[dict[str, Any]]()
        try:
            while line := await reader.readline():
                answers.append(json.loads(line))
        finally:
            writer.transport.abort()
        return answers


async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> tuple[asyncio.Server, AgentAddress]:
    """Listen as the program of an agent does, on any port."""
    context, digest = agent_context(AUTHORITY.trusted)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context, limit=MAX_REQUEST_BYTES)
    host, port = server.sockets[0].getsockname()
    return server, AgentAddress(host, port, digest)


HELLO = {"hello": {"version": VERSION, "prefix": "1"}}


@asynccontextmanager
async def silent_after(*frames: dict[str, Any]) -> AsyncIterator[AgentAddress]:
    """Run an agent that says these messages and then nothing."""
    writers = list[asyncio.StreamWriter]()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)  # Python 3.13 would close it when nothing refers to it
        for frame in frames:
            writer.write(encoded(frame))

    server, address = await listening(serve)
    try:
        yield address
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def _end(relay: AgentRelay, server: asyncio.Server, connections: AgentConnections) -> None:
    """Disconnect everybody when the agent is to end, and listen no more, as the program does."""
    await relay.over.wait()
    server.close()
    await relay.close()
    await connections.cut()
    # Some may still have been in the handshake.
    await until_disconnected(server)


@asynccontextmanager
async def played_agent(
    engines: PlayedEngines, folder: Path, version: str = VERSION
) -> AsyncIterator[PlayedAgent]:
    """Run an agent with a played replica."""
    workers = []

    async def start(order: ServeOrder) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        options = ServingOptions(order.cache_bytes, order.weights)
        worker, stream = start_serving(engines, Path(order.base), folder / "log", options, [folder])
        workers.append(worker)
        return await asyncio.open_connection(sock=stream, limit=MAX_REQUEST_BYTES)

    relay = AgentRelay(folder / "files", version, start)
    connections = AgentConnections(relay)
    server, address = await listening(connections.serve)
    ending = asyncio.create_task(_end(relay, server, connections))
    try:
        yield PlayedAgent(relay, address, folder)
    finally:
        relay.over.set()
        await ending
        for worker in workers:
            worker.kill()
        if relay._replica is not None:
            await relay._replica
