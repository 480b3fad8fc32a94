"""One live replica: its adapters, its health checks, and its end. `replica_group.py` manages several."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Protocol
from zlib import crc32

from tuneship.host.thread_pools import Threads
from tuneship.processes.worker_protocol import Worker
from tuneship.replicas.replica_link import Adapter, FilesAway, ReplicaLink
from tuneship.serving.replica_client import (
    GenerateRequest,
    ReplicaLost,
    ReplicaRefused,
    ServingError,
)

# Time limit for one token; a replica may have a long prompt to prefill before.
CHECK_PATIENCE_S = 120.0
# Every model has a token 0: one step over it shows that the model's output is finite.
CHECK_TOKENS = (0,)


class Replica:
    """A replica with a loaded base model."""

    def __init__(self, worker: Worker, link: ReplicaLink, number: int = 0) -> None:
        """`worker`: the replica's process, or an object that can be ended like one.

        `number`: unique in the group, which sets it; the oldest replica has the smallest.
        """
        self.worker = worker
        self.link = link
        self.number = number
        self.adapters: set[str] = set()
        # Consecutive health checks without an answer.
        self.failed_probes = 0
        # Requests in its queue at the last health check.
        self.waiting = 0
        # Requests that it runs at once.
        self.slots = 1
        # All counts of the last health check that it passed, as the engine names them.
        self.stats: Mapping[str, int] = {}
        self._changing = asyncio.Lock()
        # The latest entering of a hold, which goes on if nobody waits for it any more.
        self._entering: asyncio.Task[Path] | None = None

    @property
    def is_live(self) -> bool:
        """Whether it can serve requests."""
        # A killed process disconnects a moment before the system reports its end.
        return not self.link.is_lost and self.worker.exit_code() is None

    @property
    def is_answering(self) -> bool:
        """Whether it lives and passed the last health check."""
        return self.is_live and self.failed_probes == 0

    @property
    def busy(self) -> int:
        """Requests in flight there, as far as this process knows."""
        return self.link.in_flight

    def has(self, model: str | None) -> bool:
        """Whether it has an adapter; every replica has the base model (None)."""
        return model is None or model in self.adapters

    def rank_for(self, model: str | None) -> int:
        """Rendezvous hash: sorting by it gives a stable order of replicas per model, whichever come and go."""
        return crc32(f"{self.number} {model or ''}".encode())

    async def probe(self, patience_s: float) -> None:
        """Run a health check; a replica answers between two steps."""
        try:
            async with asyncio.timeout(patience_s):
                stats = await self.link.stats()
        except (TimeoutError, ServingError):
            self.failed_probes += 1
        else:
            self.failed_probes = 0
            self.stats = stats
            self.waiting, self.slots = stats.get("waiting", 0), stats.get("rows", 1)

    async def load(self, adapter: Adapter | None) -> None:
        """Load an adapter that is not loaded yet. Raises `ServingError`."""
        if adapter is None or self.has(adapter.name):
            return
        async with self._changing:
            if self.has(adapter.name):
                return
            with ExitStack() as held:
                if adapter.hold is not None:
                    try:
                        await self._enter(adapter.hold(), held)
                    except OSError as error:
                        text = f"adapter files cannot be read: {type(error).__name__}"
                        raise ReplicaRefused(text) from error
                    except Exception as error:
                        raise FilesAway("the adapter's files cannot be had now") from error
                await self.link.load(adapter.name, adapter.path, adapter.key)
            self.adapters.add(adapter.name)

    async def _enter(self, hold: AbstractContextManager[Path], held: ExitStack) -> None:
        """Enter the hold on a stack in a thread of its own, since files may be downloaded for long.

        The thread cannot be cancelled: if the waiting is, the stack is closed as soon as the thread has ended.
        """
        # An abandoned download may still run. It is waited for here and not in the queue for the thread, which a
        # cancellation would leave filled with downloads that nobody wants.
        if self._entering is not None:
            await asyncio.wait([self._entering])
        threads = Threads("files of an adapter", 1)
        self._entering = asyncio.create_task(threads.run(held.enter_context, hold))
        try:
            await asyncio.shield(self._entering)
        except asyncio.CancelledError:

            def release(entering: "asyncio.Task[Path]") -> None:
                # Read, as asyncio would log an error that nobody asked for.
                if not entering.cancelled():
                    entering.exception()
                held.close()

            self._entering.add_done_callback(release)
            raise

    async def unload(self, adapter: str) -> None:
        """Unload an adapter. It gets no more requests at once, but stays loaded while one in flight uses it."""
        async with self._changing:
            if not self.has(adapter):
                return
            self.adapters.discard(adapter)
            try:
                await self.link.unload(adapter)
            except ReplicaRefused:
                self.adapters.add(adapter)

    async def check(self, model: str | None, patience_s: float = CHECK_PATIENCE_S) -> None:
        """Generate one token with the model. Raises `ServingError` if that fails or takes too long."""
        request = GenerateRequest(tokens=CHECK_TOKENS, max_tokens=1, adapter=model)
        try:
            async with (
                asyncio.timeout(patience_s),
                self.link.generate(request) as generation,
            ):
                async for _ in generation:
                    pass
        except TimeoutError:
            raise ReplicaLost("the replica did not make a token in time") from None

    async def finish(self, patience_s: float, poll_s: float) -> None:
        """Drain: end the replica when nothing is in flight, or after `patience_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.link.in_flight and self.is_live:  # noqa: ASYNC110 - polled, it is rare
                    await asyncio.sleep(poll_s)
        await self.end()

    async def end(self) -> None:
        """End the replica at once, and wait until its process is gone."""
        await self.link.aclose()
        await Threads("end of a replica", 1).run(self.worker.kill)


class StartReplica(Protocol):
    """A function that starts a replica of an engine."""

    async def __call__(self, base: Path, log: Path) -> Replica:
        """Return when the base model is loaded; after an error nothing is left running. Raises `ServingError`,
        `OSError`.

        Called on the event loop's own thread: the parent-death signal follows the thread that starts a process.
        """
        ...
