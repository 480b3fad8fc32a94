"""The replicas of each base model: started, watched, spread over models, drained and replaced.

A group knows how many replicas there shall be and on how many of them each model is asked; why, it does not know. It
obeys `ReplicaGroup` of `replica_protocol.py`. Knows no deployment and no HTTP. The process:
`tuneship/serving/replica.py`.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tuneship.runtime.landlock import Places
from tuneship.runtime.replica_handle import ReplicaHandle
from tuneship.runtime.replica_protocol import (
    Adapter,
    NoReplica,
    OpenedReplica,
    OpenReplica,
    ReplicaEvent,
    ReplicaGroup,
)
from tuneship.runtime.worker_protocol import Runtime, WorkerSpec
from tuneship.serving.replica_client import (
    GenerateRequest,
    ReplicaLine,
    ReplicaLost,
    ServingError,
    TokenStream,
)

logger = logging.getLogger(__name__)

# A replica that is too many takes no new request; those under way may last so long, and none may
# last longer.
DRAIN_S = 150.0
LOOK_EVERY_S = 0.05
# A process that lives and does not answer so many probes in turn is ended, to be replaced.
HUNG_PROBES = 6
# A big model takes minutes to read; a process that hangs before it is ready must not be waited
# for without end.
START_PATIENCE_S = 900.0
# Between failed starts.
LONGEST_PAUSE_S = 30.0
# Replicas that may be lost while an adapter is loaded on them, before that is given up.
LOSSES_BORNE = 3


def no_limit(_base: Path) -> int:
    """Of the memory for keys and values: rows of full length may need what they need."""
    return 0


def replica_process(
    runtime: Runtime,
    cache_bytes: Callable[[Path], int] = no_limit,
    adapters: Path | None = None,
) -> OpenReplica:
    """A replica with our own engine, as a process on this machine; `cache_bytes` is asked at its start.

    `adapters`: the folder that holds the adapters it will load, which must exist: it reads nothing else but its base.
    """
    loaded_from = () if adapters is None else (adapters,)

    async def open_replica(base: Path, log: Path) -> OpenedReplica:
        room = ("--cache-bytes", str(cache_bytes(base)))
        ours, theirs = socket.socketpair()
        with theirs:
            spec = WorkerSpec(
                module="tuneship.serving",
                arguments=("--base", str(base), "--fd", str(theirs.fileno()), *room),
                log=log,
                inherited=(theirs.fileno(),),
                places=Places(readable=(base, *loaded_from)),
            )
            try:
                # On the event loop's own thread: the parent-death signal follows the thread that starts the process.
                worker = runtime.start(spec)
            except BaseException:
                ours.close()
                raise
        try:
            return OpenedReplica(worker, await ReplicaLine.open(ours))
        except BaseException:  # refused, lost, or given up: no process without a line to it
            worker.kill()
            raise

    return open_replica


class ReplicaSet:
    """The replicas of one base model."""

    def __init__(self, open_replica: OpenReplica, base: Path, log: Path) -> None:
        """Nothing is started yet."""
        self._open = open_replica
        self._base = base
        self._log = log
        self._numbers = count()
        self._replicas: list[ReplicaHandle] = []
        self._leaving: list[ReplicaHandle] = []
        self._starts: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[ReplicaEvent] = deque(maxlen=100)
        self._adapters: dict[str, Adapter] = {}
        self._wanted = 1
        self._widths: Mapping[str | None, int] = {}
        self._failures = 0
        self._fault = ""
        self._no_start_before = 0.0
        self._turn = 0
        self.ready_calls = 0

    # What there is.

    @property
    def live(self) -> list[ReplicaHandle]:
        """Replicas that can be asked, the oldest first."""
        return [one for one in self._replicas if one.is_live]

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [one.worker.pid for one in self.live]

    @property
    def waiting(self) -> int:
        """Requests that the replicas had queued at the last probe."""
        return sum(one.waiting for one in self.live)

    @property
    def slots(self) -> int:
        """Requests that one of them runs at once."""
        return min((one.slots for one in self.live), default=1)

    def answering(self, model: str | None) -> int:
        """Replicas that have the model, are asked for it and answered the last probe."""
        return sum(one.has(model) and one.is_answering for one in self._asked_for(model))

    def serving(self, model: str | None) -> list[int]:
        """The numbers of the live replicas that have the model and are asked for it."""
        return [one.number for one in self._asked_for(model) if one.has(model)]

    def _asked_for(self, model: str | None) -> list[ReplicaHandle]:
        return self._chosen(model, self.live)

    def _chosen(self, model: str | None, among: list[ReplicaHandle]) -> list[ReplicaHandle]:
        width = max(1, self._widths.get(model, len(among)))
        if width >= len(among):
            return among
        return sorted(among, key=lambda one: one.rank_for(model))[:width]

    def take_events(self) -> list[ReplicaEvent]:
        """What happened since the last call."""
        told = list(self._events)
        self._events.clear()
        return told

    def _tell(
        self,
        level: str,
        message: str,
        replica: ReplicaHandle | None = None,
        *,
        is_end: bool = False,
    ) -> None:
        """The service's log, which only its operator reads, names the process."""
        number = logging.getLevelNamesMapping()[level.upper()]
        if replica is None:
            logger.log(number, "%s", message)
            self._events.append(ReplicaEvent(level, message))
            return
        logger.log(number, "%s: process %s", message, replica.worker.pid)
        self._events.append(ReplicaEvent(level, message, replica.number, is_end))

    # How many there are.

    def resize(self, wanted: int, widths: Mapping[str | None, int]) -> None:
        """Set how many there shall be, and on how many each model is asked (all, unless it is named)."""
        self._wanted = wanted
        self._widths = dict(widths)
        staying = sorted(self.live, key=lambda one: (one.unanswered > 0, one.number))
        for replica in staying[wanted:]:
            self._replicas.remove(replica)
            self._leaving.append(replica)
            self._keep(self._let_finish(replica))
        self._bury()
        if not self._is_pausing:
            self._grow(wanted)

    async def _let_finish(self, replica: ReplicaHandle) -> None:
        try:
            await replica.finish(DRAIN_S, LOOK_EVERY_S)
        finally:
            self._leaving.remove(replica)
        self._tell("info", "replica ended", replica, is_end=True)

    def _bury(self) -> None:
        """Tell and forget those that died, and leave no zombie."""
        for replica in [one for one in self._replicas if not one.is_live]:
            self._tell("error", "replica lost", replica, is_end=True)
            self._replicas.remove(replica)
            self._leaving.append(replica)
            self._keep(self._clear_away(replica))

    async def _clear_away(self, replica: ReplicaHandle) -> None:
        """What it leaves behind; `close` does it where this is cut off."""
        try:
            await replica.end()
        finally:
            self._leaving.remove(replica)

    @property
    def _is_pausing(self) -> bool:
        return asyncio.get_running_loop().time() < self._no_start_before

    def _grow(self, wanted: int) -> None:
        for _ in range(wanted - len(self.live) - len(self._starts)):
            task = asyncio.create_task(self._start())
            self._starts.add(task)
            task.add_done_callback(self._started)

    async def _start(self) -> None:
        """One more replica, with the adapters that it will be asked for, shown to work before it is asked."""
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                opened = await self._open(self._base, self._log)
        except TimeoutError:
            raise ReplicaLost("the replica did not become ready in time") from None
        except OSError as error:
            raise ReplicaLost(
                f"the replica could not be started: {type(error).__name__}"
            ) from error
        replica = ReplicaHandle(opened, next(self._numbers))
        try:
            await replica.check(None)
            for adapter in list(self._adapters.values()):
                if replica in self._chosen(adapter.name, [*self.live, replica]):
                    await self._prepare(replica, adapter)
        except BaseException:
            await replica.end()
            raise
        self._replicas.append(replica)
        self._tell("info", "replica started", replica)
        self._keep(self._watch(replica))

    async def _prepare(self, replica: ReplicaHandle, adapter: Adapter) -> None:
        """Raises `ReplicaLost`; an adapter that cannot be loaded is told by `ready`, and does not stop the others."""
        try:
            await replica.load(adapter)
        except ReplicaLost:
            raise
        except ServingError as error:
            logger.warning("an adapter could not be loaded: %s", error)

    def _started(self, task: "asyncio.Task[None]") -> None:
        self._starts.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        self._fault = str(error)
        pause = min(LONGEST_PAUSE_S, 2.0 ** (self._failures - 1))
        self._no_start_before = asyncio.get_running_loop().time() + pause
        self._tell("error", f"replica not started: {error}")

    async def _watch(self, replica: ReplicaHandle) -> None:
        await replica.link.wait_lost()
        self._bury()

    async def probe(self, patience_s: float) -> None:
        """Ask every live replica something (see `Replica.is_answering`); end those that hang."""
        live = self.live
        await asyncio.gather(*(replica.probe(patience_s) for replica in live))
        for replica in live:
            if replica.is_live and replica.unanswered >= HUNG_PROBES:
                self._tell("error", "replica does not answer", replica)
                replica.worker.kill()

    # What they do.

    async def ready(self, adapter: Adapter | None, width: int = 1) -> None:
        """Start what is missing, load and check the adapter. Raises `ServingError` when then none can answer."""
        self.ready_calls += 1
        model = None if adapter is None else adapter.name
        if model in self._widths:  # at once, not at the next `resize`
            self._widths = {**self._widths, model: max(width, self._widths[model])}
        await self._loaded(adapter, width, is_checked=True)

    async def _loaded(self, adapter: Adapter | None, width: int, *, is_checked: bool) -> None:
        for _ in range(LOSSES_BORNE):
            await self._at_least(width)
            try:
                for replica in self._asked_for(None if adapter is None else adapter.name):
                    await self._load(replica, adapter, is_checked=is_checked)
            except ReplicaLost:
                self._bury()
                continue
            return
        raise ReplicaLost("the replica's process ended while the model was loaded")

    async def _load(
        self, replica: ReplicaHandle, adapter: Adapter | None, *, is_checked: bool
    ) -> None:
        if adapter is None or replica.has(adapter.name):
            return
        await replica.load(adapter)
        self._adapters[adapter.name] = adapter
        if is_checked:
            try:
                await replica.check(adapter.name)
            except Exception:  # not at a cancellation: nobody waits for a replica's answer then
                await replica.unload(adapter.name)
                raise

    async def _at_least(self, width: int) -> None:
        """Raises `NoReplica` when starts fail and leave none; with some, the missing ones are left to `resize`."""
        self._wanted = max(self._wanted, width)
        while len(self.live) < max(1, min(width, self._wanted)):  # `resize` may lower it meanwhile
            self._bury()
            self._grow(max(1, self._wanted))
            done, _ = await asyncio.wait(self._starts, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() for task in done):
                raise NoReplica("the replicas are being ended")
            error = next((error for task in done if (error := task.exception())), None)
            if error is not None and self.live:
                return
            if error is not None:
                raise NoReplica(str(error)) from error

    async def generate(self, adapter: Adapter | None, request: GenerateRequest) -> TokenStream:
        """Ask the least busy replica that has the adapter; waits for a start only when there is none."""
        model = None if adapter is None else adapter.name
        able = self._able(model)
        if not able:
            if not self.live and self._is_pausing:
                raise NoReplica(f"no replica can be started now: {self._fault}")
            try:
                await self._loaded(adapter, 1, is_checked=False)
            except ReplicaLost as lost:
                raise NoReplica(str(lost)) from lost
            able = self._able(model)
        if not able:
            raise NoReplica("the replica's process ended")
        self._turn += 1
        turns = able[self._turn % len(able) :] + able[: self._turn % len(able)]
        chosen = min(turns, key=lambda one: (one.unanswered > 0, one.link.in_flight))
        return chosen.link.generate(request)

    def _able(self, model: str | None) -> list[ReplicaHandle]:
        asked = [one for one in self._asked_for(model) if one.has(model)]
        return asked or [one for one in self.live if one.has(model)]

    async def unload(self, adapter: str) -> None:
        """Unload an adapter that nobody needs now; one in use stays."""
        self._adapters.pop(adapter, None)
        for replica in self.live:
            try:
                await replica.unload(adapter)
            except ReplicaLost:
                continue  # its adapters went with it

    # The end.

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the processes, those that start or leave too; nothing is left to run."""
        self._wanted = 0
        ending, self._replicas = [*self._replicas, *self._leaving], []
        tasks = [*self._starts, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in ending:
            await replica.end()


class ReplicaPool:
    """The replicas of all base models."""

    def __init__(
        self,
        runtime: Runtime,
        logs: Path,
        others: Mapping[Path, OpenReplica] | None = None,
        cache_bytes: Callable[[Path], int] = no_limit,
        adapters: Path | None = None,
    ) -> None:
        """`logs`: a folder for what the processes print. `others`: bases that another engine than ours serves.

        `cache_bytes`: memory for keys and values of one replica of a base model. `adapters`: see `replica_process`.
        """
        self._open = replica_process(runtime, cache_bytes, adapters)
        self._others = others or {}
        self._logs = logs
        self._groups: dict[Path, ReplicaGroup] = {}

    @property
    def groups(self) -> Mapping[Path, ReplicaGroup]:
        """Those that were asked for, by base model directory."""
        return self._groups

    def of(self, base: Path) -> ReplicaGroup:
        """The replicas of one base model directory."""
        if base not in self._groups:
            log = self._logs / f"replica-{base.name}.log"
            self._groups[base] = ReplicaSet(self._others.get(base, self._open), base, log)
        return self._groups[base]

    async def close(self) -> None:
        """End every replica."""
        for group in self._groups.values():
            await group.close()
