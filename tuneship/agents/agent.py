"""The program that runs one replica on a node: `python -m tuneship.agents.agent --trust CERTIFICATE --host HOST`.

With `--kind train` it runs one training instead (`agent_training.py`).

It prints where it listens and the digest of its certificate, serves the services that have a certificate of the
authority that it trusts, and starts the replica that their leader orders as a process of its own, isolated like those
of a service. It holds no credentials and knows no database. It ends with its parent, unless its options say otherwise,
with its replica, when the leader orders it, and when no service was connected for ten minutes or as long as its options
say.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import stat
import tempfile
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tuneship.agents.agent_protocol import (
    HEARTBEAT_S,
    MAX_REQUEST_BYTES,
    AgentAddress,
    CannotServe,
    ServeOrder,
)
from tuneship.agents.agent_relay import AgentRelay
from tuneship.agents.agent_training import AgentTraining
from tuneship.agents.base_digest import check_base
from tuneship.agents.certificates import agent_context
from tuneship.agents.training_protocol import TRAIN
from tuneship.host.machine import cache_share
from tuneship.host.staging import remove_abandoned, staged
from tuneship.host.thread_pools import Threads
from tuneship.isolation.isolation import hide
from tuneship.isolation.landlock import Places
from tuneship.isolation.self_check import open_ways
from tuneship.processes.launch import die_with_parent, leave_no_core, outlive_parent
from tuneship.processes.worker_processes import LocalProcesses, last_line
from tuneship.processes.worker_protocol import Worker
from tuneship.replicas.engine_kinds import VllmServer
from tuneship.replicas.replica_link import ReplicaLink
from tuneship.replicas.serving_process import ServingOptions, start_serving
from tuneship.serving.replica_client import ServingError

logger = logging.getLogger(__name__)

ALONE_S = 600.0
# What serves a connection ends so soon after it was closed, or cut.
CLOSED_S, CUT_PATIENCE_S = 0.1, 1.0
# Until the connection to a server that was killed is closed, and its files are removed.
CLOSED_PATIENCE_S = 5.0
SERVE = "serve"
AGENT = "agent-"
# The process writes where the agent does.
LOG = Path("/dev/stderr")


class AgentConnections:
    """Keeps the services' connections to the agent, and closes all of them when the agent ends."""

    def __init__(self, relay: AgentRelay | AgentTraining) -> None:
        """Keep the relay that serves each connection."""
        self._relay = relay
        self._open: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()
        self._is_over = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one until it ends."""
        if self._is_over:  # its handshake was still in progress when the agent stopped listening
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            await self._relay.serve(reader, writer)
        finally:
            self._open.discard(writer)
            self._ended.set()

    async def cut(self) -> None:
        """Cut the connections that are still open, because their services do not answer."""
        self._is_over = True
        await self._wait_for_all(CLOSED_S)  # some have just been closed
        if self._open:
            logger.warning("the agent ends and cuts connections on which nobody answers")
            for writer in self._open:
                writer.transport.abort()
            await self._wait_for_all(CUT_PATIENCE_S)

    async def _wait_for_all(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._ended.clear()
                    await self._ended.wait()


class NodeReplica:
    """The process of the replica on this node: started, checked and ended."""

    def __init__(self, files: Path, scratch: Path) -> None:
        """`files`: folder of adapter files that the process may read. `scratch`: folder for files that it may not
        read.
        """
        self._files = files
        self._scratch = scratch
        self._threads = Threads("start of a replica", 1)
        self._worker: Worker | None = None
        # Connection to an engine that is not ours.
        self._link: ReplicaLink | None = None
        # Answers for that engine.
        self._serving: asyncio.Task[None] | None = None

    async def start(self, order: ServeOrder) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start the process and return the streams of its socket. Raises `CannotServe` and `OSError`."""
        base = Path(order.base)
        await self._threads.run(check_base, base, order.digest)
        if order.vllm is not None:
            return await self._start_vllm(base, order.vllm)
        cache_bytes = order.cache_bytes or cache_share(base, order.processes)
        runtime = LocalProcesses(isolated=order.isolated)
        options = ServingOptions(cache_bytes, order.weights)
        self._worker, stream = start_serving(runtime, base, LOG, options, [self._files])
        try:
            if order.isolated:  # while it loads the model; it gets no request before
                await self._threads.run(self.check_isolation, base)
        except BaseException:
            stream.close()
            self.end()
            raise
        return await asyncio.open_connection(sock=stream, limit=MAX_REQUEST_BYTES)

    async def _start_vllm(
        self, base: Path, server: VllmServer
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start vLLM's server, and answer the service in its place. Raises `CannotServe` and `OSError`."""
        from tuneship.agents.link_server import LinkServer  # noqa: PLC0415 - loads httpx
        from tuneship.replicas.vllm import vllm_starter  # noqa: PLC0415

        try:
            replica = await vllm_starter(LocalProcesses(isolated=False), server)(base, LOG)
        except ServingError as error:
            raise CannotServe(str(error)) from error
        self._worker, self._link = replica.worker, replica.link
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs, limit=MAX_REQUEST_BYTES)
        self._serving = asyncio.create_task(LinkServer(replica, writer).serve(reader))
        return await asyncio.open_connection(sock=ours, limit=MAX_REQUEST_BYTES)

    def check_isolation(self, base: Path) -> None:
        """Have a worker like the replica try to break out. Raises `CannotServe` if it can."""
        try:
            still_open = open_ways(
                partial(last_line, places=Places((base, self._files))),
                self._scratch,
                processes={"the agent": os.getpid()},
                folders=[self._scratch, self._scratch.parent],
            )
        except ValueError as error:
            raise CannotServe("the node cannot isolate a worker: the test failed") from error
        if still_open:
            raise CannotServe(f"the node cannot isolate a worker: {', '.join(still_open)}")

    def end(self) -> None:
        """End the process at once."""
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        """End the process, and wait until nothing of it is left."""
        try:
            # First the decrypted adapters: a killed server does not remove them, and this agent may be killed as well.
            if self._link is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSED_PATIENCE_S):
                        await self._link.aclose()
        finally:
            self.end()
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=CLOSED_PATIENCE_S)


async def run(options: argparse.Namespace, parent: int | None) -> None:
    """Listen, and serve until the end. Raises `OSError` if no port is free, `ValueError` for a bad certificate.

    `parent`: it ends with this process; None: no matter what its parent does.
    """
    context, digest = agent_context(options.trust)
    with staged(own_folder(), AGENT, lambda own: remove_abandoned(own, AGENT)) as folder:
        files, scratch = folder / "files", folder / "scratch"
        for place in (files, scratch):
            place.mkdir()
        tempfile.tempdir = str(scratch)  # so that nothing of the agent lies elsewhere
        replica = NodeReplica(files, scratch)
        relay: AgentRelay | AgentTraining
        if options.kind == TRAIN:
            relay = AgentTraining(files, version("tuneship"), replica.check_isolation)
        else:
            relay = AgentRelay(files, version("tuneship"), replica.start)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, relay.over.set)
        with listener(options.host or own_address(options.towards), options.ports) as sock:
            address = AgentAddress(sock.getsockname()[0], sock.getsockname()[1], digest)
            connections = AgentConnections(relay)
            server = await asyncio.start_server(
                connections.serve, sock=sock, ssl=context, limit=MAX_REQUEST_BYTES
            )
            os.write(options.ready_fd, f"{address.ready_line()}\n".encode())
            await until_over(relay, parent, options.alone_s)
            server.close()
            await relay.close()
            await replica.close()
            await connections.cut()


def own_folder() -> Path:
    """Make the folder for the agents of this user on this node. Raises `OSError`.

    An agent that is killed leaves a job's data there. The next one on the node removes it.
    """
    folder = Path(tempfile.gettempdir()) / f"tuneship-agents-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Its name can be guessed, and everybody may write to /tmp.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a private folder of this user: remove it")
    return folder


async def until_over(relay: AgentRelay | AgentTraining, parent: int | None, alone_s: float) -> None:
    """Send heartbeats until the agent has to end, its parent has ended, or no service was connected for too long."""
    loop = asyncio.get_running_loop()
    connected_at = loop.time()
    while not relay.over.is_set() and parent in (None, os.getppid()):
        relay.send_heartbeat()
        connected_at = loop.time() if relay.is_connected else connected_at
        if loop.time() - connected_at > alone_s:
            return
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await relay.over.wait()
        except TimeoutError:
            continue


def listener(host: str, ports: range) -> socket.socket:
    """Listen on the first free port; 0 takes any. Raises `OSError` when none is free."""
    for port in ports:
        with suppress(OSError):
            return socket.create_server((host, port))
    raise OSError(f"{host} has no free port in {ports.start}-{ports.stop - 1}")


def own_address(other: str) -> str:
    """The address of this machine on the way to another, `host:port`; nothing is sent."""
    host, _, port = other.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port)))
        return sock.getsockname()[0]


def port_range(text: str) -> range:
    """Read `20000-20999` or one number. Raises `ValueError`."""
    first, _, last = text.partition("-")
    ports = range(int(first), int(last or first) + 1)
    if not ports or not 0 <= ports.start <= ports.stop <= 65536:
        raise ValueError("no range of ports")
    return ports


def main() -> None:
    """Run one agent."""
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="python -m tuneship.agents.agent", description=__doc__)
    parser.add_argument("--kind", choices=(SERVE, TRAIN), default=SERVE, help="what it runs")
    parser.add_argument("--trust", required=True, help="certificate of the service's authority")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--host", help="the address to listen on")
    place.add_argument("--towards", help="`host:port`: listen on the address on the way there")
    parser.add_argument("--ports", type=port_range, default=range(1), help="e.g. 20000-20999")
    parser.add_argument("--ready-fd", type=int, default=1, help="where to say that it listens")
    parser.add_argument("--alone-s", type=float, default=ALONE_S, help="end when alone so long")
    parser.add_argument("--outlives-parent", action="store_true", help="continue when it ends")
    options, parent = parser.parse_args(), os.getppid()
    if options.outlives_parent:
        outlive_parent()
    else:
        die_with_parent(parent)
    leave_no_core()
    hide()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    asyncio.run(run(options, None if options.outlives_parent else parent))


if __name__ == "__main__":
    main()
