"""Measures what a token costs through an agent and its TLS connection beside the socket pair of a child process.

    python benchmarks/agent_link.py [--streams 32] [--seconds 5] [--rounds 5]

The engine is emulated: every 2 ms it makes one token for each running request, and a token is the time at which it was
made. It sends them in the messages of a real replica, so everything but the model is the product's: `SocketLink`,
`AgentLink`, `AgentRelay`, the certificates. Each round measures all ways, beginning with another one. Prints medians:
tokens a second, processor time a token of the service's side and of the agent, delay of a token from the engine to its
reader, and the round trip of a health check; then the processor time of both ends for sending an adapter of 80 MiB.
"""

import argparse
import asyncio
import json
import secrets
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tuneship.agents.agent import ALONE_S, until_over
from tuneship.agents.agent_link import AgentAccess, open_agent
from tuneship.agents.agent_protocol import MAX_REQUEST_BYTES, AgentAddress, ServeOrder
from tuneship.agents.agent_relay import AgentRelay
from tuneship.agents.certificates import AgentAuthority, agent_context
from tuneship.serving.replica_client import GenerateRequest, SocketLink

STEP_S = 0.002
TOKENS = 100
TRIPS = 200
ADAPTER_BYTES = 80 << 20
VERSION = "measured"
ORDER = ServeOrder("", "", isolated=False, cache_bytes=0, processes=1, weights=None)
PAIR, ONE, TWO = "socket pair", "agent, one service", "agent, two services"
FACTS = {"pid": 1, "parameters": 1, "context_length": 1, "vocabulary": 1, "dtype": "none"}


def now_us() -> int:
    """The clock that all processes of a machine share."""
    return time.monotonic_ns() // 1000


# The emulated engine.


def emulate(descriptor: int) -> None:
    """Make tokens for all requests, until the socket closes."""
    stream = socket.socket(fileno=descriptor)
    left, rest = dict[str, int](), b""
    stream.sendall(json.dumps({"ready": FACTS}).encode() + b"\n")
    due = time.monotonic()
    while True:
        due = max(due + STEP_S, time.monotonic())
        while select.select([stream], [], [], max(0, due - time.monotonic()) if left else None)[0]:
            if not (data := stream.recv(1 << 18)):
                return
            *lines, rest = (rest + data).split(b"\n")
            for frame in map(json.loads, lines):
                if frame["op"] == "generate":
                    left[frame["id"]] = frame["max_tokens"]
                else:
                    answer = {"id": frame["id"], "ok": True, "rows": 32, "waiting": 0}
                    stream.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
            if not left:
                due = time.monotonic() + STEP_S
        made = now_us()
        tokens = [[name, made] for name in left]
        left = {name: count - 1 for name, count in left.items()}
        finished = [[name, "length"] for name, count in left.items() if not count]
        left = {name: count for name, count in left.items() if count}
        frame = {"tokens": tokens, "finished": finished}
        stream.sendall(json.dumps(frame, separators=(",", ":")).encode() + b"\n")


def start_engine() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Start the emulated engine on a socket pair."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, "--engine", str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()])


# The agent, in a process of its own.


async def run_agent(trusted: str) -> None:
    """Be the agent of an emulated engine until it shall end."""

    async def start(_: ServeOrder) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        stream, _process = start_engine()
        return await asyncio.open_connection(sock=stream, limit=MAX_REQUEST_BYTES)

    context, digest = agent_context(trusted)
    with tempfile.TemporaryDirectory() as folder:
        relay = AgentRelay(Path(folder), VERSION, start)
        server = await asyncio.start_server(
            relay.serve, "127.0.0.1", 0, ssl=context, limit=MAX_REQUEST_BYTES
        )
        host, port, *_ = server.sockets[0].getsockname()
        address = AgentAddress(host, port, digest)
        print(address.ready_line(), flush=True)
        await until_over(relay, None, ALONE_S)
        server.close()
        await relay.close()


# The service's side.


@dataclass
class Way:
    """One way to the engine, and what was measured on it."""

    lines: list[SocketLink]
    agent: int | None
    """Process id of the agent."""
    tokens_per_s: list[float] = field(default_factory=list[float])
    own_us: list[float] = field(default_factory=list[float])
    agent_us: list[float] = field(default_factory=list[float])
    delays_ms: list[float] = field(default_factory=list[float])
    trips_ms: list[float] = field(default_factory=list[float])

    async def measure(self, streams: int, seconds: float) -> None:
        """Read streams for some seconds, then run health checks."""
        until = time.monotonic() + seconds
        begun, own = time.monotonic(), time.process_time()
        agent = 0.0 if self.agent is None else cpu_s(self.agent)
        counts = await asyncio.gather(
            *(self._read(self.lines[n % len(self.lines)], until) for n in range(streams))
        )
        count = sum(counts)
        self.tokens_per_s.append(count / (time.monotonic() - begun))
        self.own_us.append((time.process_time() - own) / count * 1e6)
        if self.agent is not None:
            self.agent_us.append((cpu_s(self.agent) - agent) / count * 1e6)
        for _ in range(TRIPS):
            begun = time.perf_counter()
            await self.lines[0].stats()
            self.trips_ms.append((time.perf_counter() - begun) * 1000)

    async def _read(self, line: SocketLink, until: float) -> int:
        count = 0
        while time.monotonic() < until:
            async for chunk in line.generate(GenerateRequest(tokens=(1,), max_tokens=TOKENS)):
                arrived = now_us()
                self.delays_ms.extend((arrived - token) / 1000 for token in chunk)
                count += len(chunk)
        return count


def cpu_s(pid: int) -> float:
    """CPU seconds of a process without its children."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text(encoding="ascii").split()[0]) for file in files) / 1e9


@asynccontextmanager
async def pair() -> AsyncGenerator[Way]:
    """A replica as a child process."""
    stream, process = start_engine()
    line = await SocketLink.open(stream)
    yield Way([line], None)
    await line.aclose()
    await asyncio.to_thread(process.wait, 30)


@asynccontextmanager
async def agent(services: int) -> AsyncGenerator[Way]:
    """A replica of an agent, which several services ask."""
    authority = AgentAuthority(secrets.token_bytes(32))
    command = [sys.executable, __file__, "--agent", authority.trusted]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    if process.stdout is None or not (said := await process.stdout.readline()):
        raise SystemExit("the agent did not start")
    address = AgentAddress.said_in(said.decode())
    if address is None:
        raise SystemExit("the agent does not listen")
    access = AgentAccess(authority.client_context(datetime.now(UTC)), 1, VERSION)
    links = [
        await open_agent(address, access, None if n else ORDER, nothing) for n in range(services)
    ]
    yield Way(list(links), process.pid)
    for link in reversed(links):
        await link.aclose()
    await process.wait()


async def nothing() -> None:
    """End nothing: the agent ends when its leader orders it."""


async def sending_s(way: Way) -> float:
    """Seconds of processor time that both ends take for the files of an adapter."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter_model.safetensors").write_bytes(secrets.token_bytes(ADAPTER_BYTES))
        own, agent = time.process_time(), cpu_s(way.agent or 0)
        await way.lines[0].load("adapter", Path(folder))
        return time.process_time() - own + cpu_s(way.agent or 0) - agent


async def measure(options: argparse.Namespace) -> tuple[dict[str, Way], float]:
    """Measure all ways in rounds, then the sending of an adapter."""
    async with pair() as first, agent(1) as second, agent(2) as third:
        ways = {PAIR: first, ONE: second, TWO: third}
        names = list(ways)
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                await ways[name].measure(options.streams, options.seconds)
        return ways, await sending_s(second)


def main() -> None:
    """Measure and print, or be the engine or the agent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        emulate(options.engine)
        return
    if options.agent is not None:
        asyncio.run(run_agent(options.agent))
        return
    ways, sending = asyncio.run(measure(options))
    for name, way in ways.items():
        _, middle, *_ = statistics.quantiles(way.delays_ms, n=4)
        last = statistics.quantiles(way.delays_ms, n=100)[-1]
        spent = f", agent {statistics.median(way.agent_us):5.1f} us" if way.agent_us else ""
        print(
            f"{name:20} {statistics.median(way.tokens_per_s):7.0f} tokens/s, "
            f"service {statistics.median(way.own_us):5.1f} us a token{spent}, "
            f"delay {middle:5.2f} ms, p99 {last:5.2f} ms, "
            f"round trip {statistics.median(way.trips_ms):5.2f} ms"
        )
    print(f"an adapter of 80 MiB   {sending:.2f} s of processor time at both ends together")


if __name__ == "__main__":
    main()
