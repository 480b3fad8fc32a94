"""All replicas of one base model: chooses one for each request, loads adapters, watches and drains them.

Where they come from is the matter of a subclass: `local_replicas.py` starts them, `agents/agent_replicas.py` uses those
that the leader of a cluster has started on agents. Knows no deployment and no HTTP.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from tuneship.replicas.replica import Replica
from tuneship.replicas.replica_link import Adapter, NoReplica
from tuneship.serving.replica_client import (
    EmbedRequest,
    GenerateRequest,
    ReplicaLost,
    ServingError,
    TokenStream,
)

logger = logging.getLogger(__name__)

# A surplus replica takes no new request and is ended after this long at the latest. No request
# may take longer.
DRAIN_S = 150.0
DRAIN_POLL_S = 0.05
# A process that fails this many consecutive health checks is ended, and replaced.
HUNG_PROBES = 6
# Loading an adapter is given up after this many replicas were lost meanwhile.
MAX_LOSSES_PER_LOAD = 3


@dataclass(frozen=True)
class ReplicaEvent:
    """An event of a replica for the logs of its deployments."""

    # `debug`, `info`, `warning` or `error`.
    level: str
    # The text, without a process id: the reader shares the replica with others.
    message: str
    # Number of the replica in its group; None for one that did not start.
    replica: int | None = None
    # Whether the replica is gone.
    is_end: bool = False


class ReplicaGroup(ABC):
    """All replicas of one base model, as the service uses them.

    `model` arguments are an adapter's name, or None for the base model.
    """

    # Whether they serve this process alone, and no other members of a cluster.
    is_own: bool

    def __init__(self, *, is_here: bool) -> None:
        """Begin without replicas. `is_here`: as processes of this machine, whose memory limits their number."""
        self.is_here = is_here
        self._replicas: list[Replica] = []
        self._leaving: list[Replica] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[ReplicaEvent] = deque(maxlen=100)
        self._adapters: dict[str, Adapter] = {}
        self._widths: Mapping[str | None, int] = {}
        self._turn = 0
        # Number of calls of `ready`: decisions based on facts from before a call have to be made again.
        self.ready_calls = 0

    # State.

    @property
    def live(self) -> list[Replica]:
        """Replicas that can serve requests, the oldest first. May be read from any thread."""
        return [replica for replica in self._replicas if replica.is_live]

    @property
    def pids(self) -> list[int]:
        """Process ids of the live replicas on this machine."""
        return [replica.worker.pid for replica in self.live if self.is_here]

    @property
    def waiting(self) -> int:
        """Number of requests that the replicas had queued at the last health check."""
        return sum(replica.waiting for replica in self.live)

    @property
    def slots(self) -> int:
        """Number of requests that one replica runs at once."""
        return min((replica.slots for replica in self.live), default=1)

    def answering(self, model: str | None) -> int:
        """Number of replicas that serve the model and passed the last health check."""
        replicas = self._placed(model, self.live)
        return sum(replica.has(model) and replica.is_answering for replica in replicas)

    def serving(self, model: str | None) -> list[int]:
        """Numbers of the live replicas that have the model and get its requests."""
        return [replica.number for replica in self._placed(model, self.live) if replica.has(model)]

    def _placed(self, model: str | None, among: list[Replica]) -> list[Replica]:
        """Choose the replicas that a model is served on."""
        width = max(1, self._widths.get(model, len(among)))
        if width >= len(among):
            return among
        return sorted(among, key=lambda replica: replica.rank_for(model))[:width]

    def take_events(self) -> list[ReplicaEvent]:
        """Return the events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def _emit(
        self,
        level: str,
        message: str,
        replica: Replica | None = None,
        *,
        is_end: bool = False,
    ) -> None:
        """Log an event and keep it for the deployments; only the service's own log names the process."""
        number = logging.getLevelNamesMapping()[level.upper()]
        if replica is None:
            logger.log(number, "%s", message)
            self._events.append(ReplicaEvent(level, message))
            return
        logger.log(number, "%s: process %s", message, replica.worker.pid)
        self._events.append(ReplicaEvent(level, message, replica.number, is_end))

    # Watching and ending replicas.

    @abstractmethod
    def resize(self, wanted: int, widths: Mapping[str | None, int]) -> None:
        """Set the number of replicas, and on how many of them each model is served (all, unless named).

        Missing replicas are started in the background; surplus ones are drained and ended.
        """

    def _retire(self, replica: Replica) -> None:
        """Send a replica no more requests, and end it when those in flight have ended, or at once if it is lost.

        The process of a lost one is reaped then.
        """
        # Read once: a replica that ends while it is drained has ended as it should.
        is_lost = not replica.is_live
        if is_lost:
            self._emit("error", "replica lost", replica, is_end=True)
        self._replicas.remove(replica)
        # `close` ends those that are leaving, in case it cancels this first.
        self._leaving.append(replica)

        async def end() -> None:
            try:
                await replica.finish(DRAIN_S, DRAIN_POLL_S)
            finally:
                self._leaving.remove(replica)
            if is_lost:
                code = replica.worker.exit_code()
                logger.warning(
                    "process %s of a lost replica ended with %s", replica.worker.pid, code
                )
            else:
                self._emit("info", "replica ended", replica, is_end=True)

        self._spawn(end())

    def _remove_dead(self) -> None:
        """Retire the replicas whose process has ended."""
        for replica in [replica for replica in self._replicas if not replica.is_live]:
            self._retire(replica)

    async def _watch(self, replica: Replica) -> None:
        await replica.link.wait_lost()
        self._remove_dead()

    async def probe(self, patience_s: float) -> None:
        """Run a health check of every live replica, and end those that hang."""
        live = self.live
        await asyncio.gather(*(replica.probe(patience_s) for replica in live))
        for replica in live:
            if replica.is_live and replica.failed_probes >= HUNG_PROBES:
                self._emit("error", "replica does not answer", replica)
                await self._end_hung(replica)

    async def _end_hung(self, replica: Replica) -> None:
        """End a replica that does not answer."""
        await replica.end()

    # Serving.

    async def ready(self, adapter: Adapter | None, width: int = 1) -> None:
        """Start missing replicas, load and check the adapter. Raises `ServingError` if no replica can serve it.

        Fewer replicas than `width` are enough if the others do not start: `resize` goes on trying.
        """
        self.ready_calls += 1
        model = None if adapter is None else adapter.name
        if model in self._widths:  # at once, not at the next `resize`
            self._widths = {**self._widths, model: max(width, self._widths[model])}
        await self._ensure_loaded(adapter, width, is_checked=True)

    async def _ensure_loaded(
        self, adapter: Adapter | None, width: int, *, is_checked: bool
    ) -> None:
        """Have `width` live replicas, and the adapter loaded on all that serve it."""
        for _ in range(MAX_LOSSES_PER_LOAD):
            await self._ensure_live(width)
            try:
                model = None if adapter is None else adapter.name
                for replica in self._placed(model, self.live):
                    await self._load(replica, adapter, is_checked=is_checked)
            except ReplicaLost:
                self._remove_dead()
                continue
            return
        raise ReplicaLost("the replica's process ended while the model was loaded")

    async def _load(self, replica: Replica, adapter: Adapter | None, *, is_checked: bool) -> None:
        if adapter is None or replica.has(adapter.name):
            return
        await replica.load(adapter)
        self._adapters[adapter.name] = adapter
        if is_checked:
            try:
                await replica.check(adapter.name)
            except Exception:  # not when cancelled: then nobody waits for the replica's answer
                await replica.unload(adapter.name)
                raise

    async def _load_placed(self, replica: Replica) -> None:
        """Load the adapters that a new replica will serve, before it gets requests. Raises `ReplicaLost`."""
        for adapter in list(self._adapters.values()):
            if replica not in self._placed(adapter.name, [*self.live, replica]):
                continue
            try:
                await replica.load(adapter)
            except ReplicaLost:
                raise
            except ServingError as error:  # `ready` reports it; the others can be served
                logger.warning("an adapter could not be loaded: %s", error)

    @property
    @abstractmethod
    def _why_no_start(self) -> str:
        """Why nothing is started now; empty where a start may succeed."""

    @abstractmethod
    async def _ensure_live(self, width: int) -> None:
        """Wait for `width` live replicas, or fewer if no more can be started. Raises `NoReplica` if none is live."""

    async def generate(self, adapter: Adapter | None, request: GenerateRequest) -> TokenStream:
        """Send a request to the least busy replica with the adapter; wait for a start only if there is none.

        Raises `NoReplica`, and `ServingError` when the adapter is refused.
        """
        return (await self._choose(adapter)).link.generate(request)

    async def embed(self, adapter: Adapter | None, request: EmbedRequest) -> list[str]:
        """Embed texts with the replica that `generate` would choose: a vector each, as float32 numbers in Base64."""
        return await (await self._choose(adapter)).link.embed(request)

    async def _choose(self, adapter: Adapter | None) -> Replica:
        model = None if adapter is None else adapter.name
        able = self._able(model)
        if not able:
            if not self.live and (why := self._why_no_start):
                raise NoReplica(f"no replica can be started now: {why}")
            try:
                await self._ensure_loaded(adapter, 1, is_checked=False)
            except ReplicaLost as lost:
                raise NoReplica(str(lost)) from lost
            able = self._able(model)
        if not able:
            raise NoReplica("the replica's process ended")
        # Round robin among those that are equally busy.
        self._turn += 1
        turns = able[self._turn % len(able) :] + able[: self._turn % len(able)]
        return min(turns, key=lambda one: (one.failed_probes > 0, one.busy))

    def _able(self, model: str | None) -> list[Replica]:
        """Live replicas for the model: those that serve it, otherwise any others."""
        placed = [replica for replica in self._placed(model, self.live) if replica.has(model)]
        return placed or [replica for replica in self.live if replica.has(model)]

    async def unload(self, adapter: str) -> None:
        """Unload an adapter that no deployment needs; one in use stays."""
        self._adapters.pop(adapter, None)
        for replica in self.live:
            try:
                await replica.unload(adapter)
            except ReplicaLost:
                continue  # its adapters went with it

    # The end.

    async def close(self) -> None:
        """End every replica, including starting and draining ones, and all tasks."""
        ending, self._replicas = [*self._replicas, *self._leaving], []
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.end() for replica in ending))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
