"""The replicas of one base model that this process starts, drains and replaces.

They are processes of this machine, or run on agents that serve nobody else. A group knows how many replicas are wanted,
not why. The process of a replica: `tuneship/serving/replica.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

from tuneship.processes.worker_protocol import Runtime
from tuneship.replicas.failed_starts import FailedStarts
from tuneship.replicas.replica import Replica, StartReplica
from tuneship.replicas.replica_group import ReplicaGroup
from tuneship.replicas.replica_link import NoReplica
from tuneship.replicas.serving_process import ServingOptions, start_serving
from tuneship.serving.replica_client import ANSWER_TIMEOUT_S, ReplicaLost, SocketLink

# A big model takes minutes to read; a process that hangs before it is ready must not be waited
# for forever.
START_TIMEOUT_S = 900.0

logger = logging.getLogger(__name__)


def usual_weights(_base: Path) -> None:
    """Let the replica choose the number format of the weights, by the model's size and the machine."""


def no_limit(_base: Path) -> int:
    """Set no limit to the KV cache: as much memory as all slots of full length may need."""
    return 0


def process_starter(
    runtime: Runtime,
    cache_bytes: Callable[[Path], int] = no_limit,
    adapters: Path | None = None,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
    weights: Callable[[Path], str | None] = usual_weights,
) -> StartReplica:
    """Make the function that starts replicas of the built-in engine, as processes on this machine.

    `cache_bytes`: called at each start. `adapters`: the existing folder of the adapters it will load; a replica reads
    nothing else but its base model. `answer_timeout_s`: see `SocketLink.open`. `weights`: number format of the
    weights of a base model, called at each start; None: the replica chooses.
    """
    loaded_from = () if adapters is None else (adapters,)

    async def start_replica(base: Path, log: Path) -> Replica:
        options = ServingOptions(cache_bytes(base), weights(base))
        worker, ours = start_serving(runtime, base, log, options, loaded_from)
        try:
            return Replica(worker, await SocketLink.open(ours, answer_timeout_s))
        except BaseException as error:
            worker.kill()  # whatever the reason: leave no process without a connection
            if isinstance(error, ReplicaLost):
                logger.warning("a replica ended with %s before it was ready", worker.exit_code())
            raise

    return start_replica


class LocalReplicas(ReplicaGroup):
    """Replicas that this process starts and uses alone."""

    is_own = True

    def __init__(
        self, start_replica: StartReplica, base: Path, log: Path, *, is_here: bool = True
    ) -> None:
        """Begin without replicas; `resize` and `ready` start them. `is_here`: as processes of this machine."""
        super().__init__(is_here=is_here)
        self._start_replica = start_replica
        self._base = base
        self._log_file = log
        self._numbers = count()
        self._starts: set[asyncio.Task[None]] = set()
        self._wanted = 1
        self._failed = FailedStarts()

    # Starting and ending replicas.

    def resize(self, wanted: int, widths: Mapping[str | None, int]) -> None:
        """Set the number of replicas, and on how many of them each model is served (all, unless named)."""
        self._wanted = wanted
        self._widths = dict(widths)
        # Those that hang leave first, then the newest.
        staying = sorted(self.live, key=lambda one: (one.failed_probes > 0, one.number))
        for replica in staying[wanted:]:
            self._retire(replica)
        self._remove_dead()
        if not self._failed.is_pausing:
            self._start_missing(wanted)

    @property
    def _why_no_start(self) -> str:
        return self._failed.why_not

    def _start_missing(self, wanted: int) -> None:
        for _ in range(wanted - len(self.live) - len(self._starts)):
            task = self._spawn(self._start())
            self._starts.add(task)
            task.add_done_callback(self._on_start_done)

    async def _start(self) -> None:
        """Start one replica, check it, and load the adapters that it will serve before it gets requests."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                replica = await self._start_replica(self._base, self._log_file)
        except TimeoutError:
            raise ReplicaLost("the replica did not become ready in time") from None
        except OSError as error:
            raise ReplicaLost(
                f"the replica could not be started: {type(error).__name__}"
            ) from error
        replica.number = next(self._numbers)
        try:
            await replica.check(None)
            await self._load_placed(replica)
        except BaseException:
            await replica.end()
            raise
        self._replicas.append(replica)
        self._emit("info", "replica started", replica)
        self._spawn(self._watch(replica))

    def _on_start_done(self, task: "asyncio.Task[None]") -> None:
        self._starts.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._failed = self._failed.with_success()
            return
        self._failed = self._failed.with_failure(str(error))
        self._emit("error", f"replica not started: {error}")

    async def _ensure_live(self, width: int) -> None:
        """Wait for `width` live replicas, or fewer if starts fail. Raises `NoReplica` if none is live."""
        self._wanted = max(self._wanted, width)
        while len(self.live) < max(1, min(width, self._wanted)):  # `resize` may lower it meanwhile
            self._remove_dead()
            self._start_missing(max(1, self._wanted))
            done, _ = await asyncio.wait(self._starts, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() for task in done):
                raise NoReplica("the replicas are being ended")
            error = next((error for task in done if (error := task.exception())), None)
            if error is not None and self.live:
                return  # `resize` starts the missing ones
            if error is not None:
                raise NoReplica(str(error)) from error

    # The end.

    async def close(self) -> None:
        """End every replica, and start no other."""
        self._wanted = 0
        await super().close()
