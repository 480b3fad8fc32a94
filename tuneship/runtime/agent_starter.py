"""Starts agents with a launcher, reads where they listen, and connects to them as their leader.

For a service that is alone (`agent_replicas.py`), and for the leader of a cluster
(`tuneship/service/deployments/agent_keeper.py`).
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.runtime.agent_link import AgentAccess, AgentLink, open_agent
from tuneship.runtime.agent_protocol import AgentAddress, ServeOrder
from tuneship.runtime.base_digest import BaseDigests
from tuneship.runtime.certificates import AgentAuthority
from tuneship.runtime.launchers import CannotLaunch, Launcher

logger = logging.getLogger(__name__)

# Ray gets slow when many jobs wait for a node.
STARTING_AT_ONCE = 4
POLL_S = 0.1


@dataclass(frozen=True)
class AgentOptions:
    """The settings that agents get."""

    isolated: bool
    """Whether a replica that its node cannot isolate must not start."""
    cache_bytes: int
    """Size limit of the KV cache of one replica; 0: a share of what is free on its node."""
    processes: int
    """The number of replicas of a base model at most."""
    weights: Callable[[Path], str | None]
    """Number format of the weights of a base model; None: the replica chooses."""
    start_timeout_s: float
    """Time limit until an agent listens."""
    alone_s: float | None = None
    """An agent ends when no service was connected for so long; None: after ten minutes."""
    digests: BaseDigests = field(default_factory=BaseDigests)
    """Digests that are known, which outlast a time of leading."""


class AgentStarter:
    """Starts agents and ends them. Used by one leader, for one time of leading."""

    def __init__(
        self,
        launcher: Launcher,
        authority: AgentAuthority,
        installation: str,
        options: AgentOptions,
        clock: Callable[[], datetime],
    ) -> None:
        """`installation`: begins the names of all its agents."""
        self._launcher = launcher
        self._authority = authority
        self._installation = installation
        self._options = options
        self._clock = clock
        self._threads = Threads("digest of a base model", 1)
        self._places = asyncio.Semaphore(STARTING_AT_ONCE)
        self._first = asyncio.Lock()
        self._has_begun = False

    def new_name(self) -> str:
        """A name that no agent has had."""
        return f"{self._installation}-{secrets.token_hex(6)}"

    async def order_for(self, base: Path) -> ServeOrder:
        """The order to serve a base model. Raises `OSError` if the model cannot be read."""
        return self._order(base, await self._threads.run(self._options.digests.of, base))

    def _order(self, base: Path, digest: str) -> ServeOrder:
        options = self._options
        return ServeOrder(
            base=str(base.absolute()),
            digest=digest,
            isolated=options.isolated,
            cache_bytes=options.cache_bytes,
            processes=options.processes,
            weights=options.weights(base),
        )

    async def start(self, name: str, keep: Callable[[], Collection[str]] = tuple) -> AgentAddress:
        """Start an agent and wait until it listens. Raises `CannotLaunch`.

        `keep`: the agents of earlier leaders that go on, asked once before the first start.
        """
        async with self._places:
            await self._begin(keep)
            await self._launcher.start(name, ("--trust", self._authority.trusted, *self._alone()))
            try:
                async with asyncio.timeout(self._options.start_timeout_s):
                    return await self._listening(name)
            except TimeoutError:
                text = f"no node had room within {self._options.start_timeout_s:g} s"
                raise CannotLaunch(text) from None

    def _alone(self) -> tuple[str, ...]:
        alone_s = self._options.alone_s
        return () if alone_s is None else ("--alone-s", f"{alone_s:g}")

    async def _listening(self, name: str) -> AgentAddress:
        while True:
            state = await self._launcher.state(name)
            if (address := AgentAddress.said_in(state.said)) is not None:
                return address
            if state.has_ended:
                raise CannotLaunch("the agent ended before it listened; its log says why")
            await asyncio.sleep(POLL_S)

    async def _begin(self, keep: Callable[[], Collection[str]]) -> None:
        """Prepare the launcher before the first start."""
        async with self._first:
            if not self._has_begun:
                await self._launcher.begin(f"{self._installation}-", keep())
                self._has_begun = True

    async def connect(
        self,
        address: AgentAddress,
        epoch: int,
        order: ServeOrder | None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> AgentLink:
        """Connect to an agent; see `open_agent`."""
        return await open_agent(address, self.access(epoch), order, end)

    def access(self, epoch: int = 0) -> AgentAccess:
        """The credentials for one connection."""
        context = self._authority.client_context(self._clock())
        return AgentAccess(context, epoch, version("tuneship"))

    async def end(self, name: str) -> None:
        """End an agent; one that its launcher cannot end now ends by itself, since nobody connects to it."""
        try:
            await self._launcher.end(name)
        except CannotLaunch as error:
            logger.warning("an agent could not be ended and will end by itself: %s", error)
