"""One live replica: what it has loaded, whether it answers, and how it ends. Its group is `replica_set.py`."""

import asyncio
from contextlib import suppress
from zlib import crc32

from tuneship.host.thread_pools import Threads
from tuneship.runtime.replica_protocol import Adapter, OpenedReplica
from tuneship.serving.replica_client import (
    GenerateRequest,
    ReplicaLost,
    ReplicaRefused,
    ServingError,
)

# For one token; a replica may have a long prompt to read before.
CHECK_PATIENCE_S = 120.0
# Any model has a token 0: one step over it shows that the model computes something finite.
CHECK_TOKENS = (0,)


class ReplicaHandle:
    """Made when its base model is loaded."""

    def __init__(self, opened: OpenedReplica, number: int) -> None:
        """`number`: counts the replicas of a group; the oldest has the smallest."""
        self.worker = opened.worker
        self.link = opened.link
        self.number = number
        self.adapters: set[str] = set()
        self.unanswered = 0
        """Probes in turn without an answer."""
        self.waiting = 0
        """Requests in its queue at the last probe."""
        self.slots = 1
        """Requests that it runs at once."""
        self._changing = asyncio.Lock()

    @property
    def is_live(self) -> bool:
        """Whether it can be asked: a killed process hangs up a moment before the system reports its end."""
        return not self.link.is_lost and self.worker.exit_code() is None

    @property
    def is_answering(self) -> bool:
        """Whether it lives and answered the last probe."""
        return self.is_live and self.unanswered == 0

    def has(self, model: str | None) -> bool:
        """Every replica has the base model."""
        return model is None or model in self.adapters

    def rank_for(self, model: str | None) -> int:
        """Replicas sorted by it come in another order for each model, which stays when others come and go."""
        return crc32(f"{self.number} {model or ''}".encode())

    async def probe(self, patience_s: float) -> None:
        """Ask it something; between two steps it answers at once."""
        try:
            async with asyncio.timeout(patience_s):
                stats = await self.link.stats()
        except (TimeoutError, ServingError):
            self.unanswered += 1
        else:
            self.unanswered = 0
            self.waiting, self.slots = stats.get("waiting", 0), stats.get("rows", 1)

    async def load(self, adapter: Adapter | None) -> None:
        """Load the adapter unless it is there. Raises `ServingError`."""
        if adapter is None or self.has(adapter.name):
            return
        async with self._changing:
            if not self.has(adapter.name):
                await self.link.load(adapter.name, adapter.path, adapter.key)
                self.adapters.add(adapter.name)

    async def unload(self, adapter: str) -> None:
        """No request is given to it from the first moment on; one that it has keeps the adapter there."""
        async with self._changing:
            if not self.has(adapter):
                return
            self.adapters.discard(adapter)
            try:
                await self.link.unload(adapter)
            except ReplicaRefused:
                self.adapters.add(adapter)

    async def check(self, model: str | None) -> None:
        """Make one token with the model. Raises `ServingError` when it cannot, or does not in time."""
        request = GenerateRequest(tokens=CHECK_TOKENS, max_tokens=1, adapter=model)
        try:
            async with (
                asyncio.timeout(CHECK_PATIENCE_S),
                self.link.generate(request) as generation,
            ):
                async for _ in generation:
                    pass
        except TimeoutError:
            raise ReplicaLost("the replica did not make a token in time") from None

    async def finish(self, patience_s: float, look_every_s: float) -> None:
        """End it when nothing is under way, or when the patience is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.link.in_flight and self.is_live:  # noqa: ASYNC110 - polled, it is rare
                    await asyncio.sleep(look_every_s)
        await self.end()

    async def end(self) -> None:
        """At once; waits until the process is gone."""
        await self.link.aclose()
        await Threads("end of a replica", 1).run(self.worker.kill)
