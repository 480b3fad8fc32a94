"""Serving processes: one group per base model, each holding the weights once and any number of adapters.

Starts a process when a base model is first needed, loads an adapter when it is first asked for, restarts what died.
Knows no deployment and no HTTP. The process itself: `tuneship/serving/replica.py`.
"""

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path

from tuneship.runtime.workers import Runtime, Worker, WorkerSpec
from tuneship.serving.line import GenerateRequest, Generation, ReplicaLine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """A tuned model's files; the name is the model id."""

    name: str
    path: Path


@dataclass
class Replica:
    """One live process."""

    worker: Worker
    line: ReplicaLine
    adapters: set[str] = field(default_factory=set[str])
    is_lost: bool = False
    """Its line broke: a killed process hangs up a moment before the system reports its end."""

    async def watch(self) -> None:
        """Notice the end of the line."""
        await self.line.wait_lost()
        self.is_lost = True

    @property
    def is_live(self) -> bool:
        """Whether it can be asked."""
        return not self.is_lost and self.worker.exit_code() is None

    async def load(self, adapter: Adapter | None) -> None:
        """Load the adapter unless it is there."""
        if adapter is not None and adapter.name not in self.adapters:
            await self.line.load(adapter.name, adapter.path)
            self.adapters.add(adapter.name)


class BaseReplicas:
    """The processes of one base model."""

    def __init__(self, runtime: Runtime, base: Path, log: Path) -> None:
        """Nothing is started yet."""
        self._runtime = runtime
        self._base = base
        self._log = log
        self._replicas: list[Replica] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._turn = 0
        self.wanted = 1

    @property
    def live(self) -> list[Replica]:
        """Processes that answer."""
        return [one for one in self._replicas if one.is_live]

    async def ready(self, adapter: Adapter | None) -> list[Replica]:
        """As many processes as wanted, each with the adapter loaded."""
        live = self.live
        if len(live) < self.wanted or not all(_has(one, adapter) for one in live):
            async with self._changing:
                for replica in self._replicas:
                    if not replica.is_live:
                        replica.worker.kill()
                self._replicas = self.live
                while len(self._replicas) < self.wanted:
                    self._replicas.append(await self._start())
                for replica in self._replicas:
                    await replica.load(adapter)
                live = self._replicas
        return live

    async def generate(self, adapter: Adapter | None, request: GenerateRequest) -> Generation:
        """Start a generation on the next process in turn."""
        replicas = await self.ready(adapter)
        self._turn += 1
        return replicas[self._turn % len(replicas)].line.generate(request)

    async def forget(self, adapter: str) -> None:
        """Unload an adapter that no deployment needs any more."""
        async with self._changing:
            for replica in self.live:
                if adapter in replica.adapters:
                    await replica.line.unload(adapter)
                    replica.adapters.discard(adapter)

    async def _start(self) -> Replica:
        ours, theirs = socket.socketpair()
        with theirs:
            spec = WorkerSpec(
                module="tuneship.serving",
                arguments=("--base", str(self._base), "--fd", str(theirs.fileno())),
                log=self._log,
                inherited=(theirs.fileno(),),
            )
            # On the event loop's own thread: the parent-death signal follows the thread that starts the process.
            worker = self._runtime.start(spec)
        try:
            line = await ReplicaLine.open(ours)
        except BaseException:  # refused, lost, or given up: no process without a line to it
            worker.kill()
            raise
        logger.info("replica started: process %d", worker.pid)
        replica = Replica(worker, line)
        watching = asyncio.create_task(replica.watch())
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return replica

    async def close(self) -> None:
        """End the processes."""
        for replica in self._replicas:
            await replica.line.aclose()
            replica.worker.kill()
        self._replicas = []


def _has(replica: Replica, adapter: Adapter | None) -> bool:
    return adapter is None or adapter.name in replica.adapters


class ReplicaPool:
    """The processes of all base models."""

    def __init__(self, runtime: Runtime, logs: Path) -> None:
        """`logs`: a folder for what the processes print."""
        self._runtime = runtime
        self._logs = logs
        self._groups: dict[Path, BaseReplicas] = {}

    def of(self, base: Path) -> BaseReplicas:
        """The processes of one base model directory."""
        if base not in self._groups:
            log = self._logs / f"replica-{base.name}.log"
            self._groups[base] = BaseReplicas(self._runtime, base, log)
        return self._groups[base]

    async def close(self) -> None:
        """End every process."""
        for group in self._groups.values():
            await group.close()
