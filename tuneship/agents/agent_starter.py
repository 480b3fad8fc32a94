"""Starts the agents of replicas, and connects to them as their leader.

For a service that is alone, with `start_replica`, and for the leader of a cluster
(`tuneship/service/cluster/agent_keeper.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuneship.agents.agent_link import AgentLink, open_agent
from tuneship.agents.agent_protocol import AgentAddress, ServeOrder
from tuneship.agents.base_digest import BaseDigests
from tuneship.agents.launchers import AgentSize, CannotLaunch, Launcher
from tuneship.agents.listening_agents import ONLY_EPOCH, ListeningAgents
from tuneship.host.thread_pools import Threads
from tuneship.replicas.engine_kinds import VllmServer
from tuneship.replicas.replica import Replica
from tuneship.serving.replica_client import ReplicaLost

if TYPE_CHECKING:  # it loads X.509
    from tuneship.agents.certificates import AgentAuthority

# Ray gets slow when many jobs wait for a node.
STARTING_AT_ONCE = 4


@dataclass(frozen=True)
class BaseOptions:
    """The settings that the agents of one base model get."""

    # Number format of the weights; None: the replica chooses.
    weights: str | None = None
    # The server that serves it; None: our own engine.
    vllm: VllmServer | None = None
    # None leaves it to the launcher.
    size: AgentSize | None = None


@dataclass(frozen=True)
class AgentOptions:
    """The settings that agents get."""

    # Whether a replica that its node cannot isolate must not start.
    isolated: bool
    # Size limit of the KV cache of one replica; 0: a share of what is free on its node.
    cache_bytes: int
    # The number of replicas of a base model at most.
    processes: int
    # The settings for the replicas of one base model.
    of_base: Callable[[Path], BaseOptions]
    # Time limit until an agent listens.
    start_timeout_s: float
    # An agent ends when no service was connected for this long; None: ten minutes.
    alone_s: float | None = None
    # Digests that are known, which outlast a time of leading.
    digests: BaseDigests = field(default_factory=BaseDigests)


class AgentStarter(ListeningAgents):
    """Starts and ends agents of replicas, during one term of one leader."""

    def __init__(
        self,
        launcher: Launcher,
        authority: "AgentAuthority",
        installation: str,
        options: AgentOptions,
        clock: Callable[[], datetime],
    ) -> None:
        """`installation`: prefix of the names of all its agents."""
        super().__init__(launcher, authority, f"{installation}-", clock, options.start_timeout_s)
        self._options = options
        self._threads = Threads("digest of a base model", 1)
        self._places = asyncio.Semaphore(STARTING_AT_ONCE)

    async def start_replica(self, base: Path, log: Path) -> Replica:  # noqa: ARG002 - the agent's output is elsewhere
        """Start an agent and its replica; implements `StartReplica`."""
        order = await self.order_for(base)
        name = self.new_name()
        end = partial(self.end, name)
        try:
            address = await self.start(name, base)
            link = await self.connect(address, ONLY_EPOCH, order, end)
        except CannotLaunch as error:
            await end()
            raise ReplicaLost(f"no agent can be started: {error}") from error
        except BaseException:  # refused, lost or cancelled: leave no agent behind
            await end()
            raise
        return Replica(link.worker, link)

    async def order_for(self, base: Path) -> ServeOrder:
        """The order to serve a base model. Raises `OSError` if the model cannot be read."""
        options = self._options
        of_base = options.of_base(base)
        return ServeOrder(
            base=str(base.absolute()),  # noqa: ASYNC240 - it asks no disk
            digest=await self._threads.run(options.digests.of, base),
            isolated=options.isolated,
            cache_bytes=options.cache_bytes,
            processes=options.processes,
            weights=of_base.weights,
            vllm=of_base.vllm,
        )

    async def start(
        self, name: str, base: Path, keep: Callable[[], Collection[str]] = tuple
    ) -> AgentAddress:
        """Start an agent for a base model and wait until it listens. Raises `CannotLaunch`.

        `keep`: the agents of earlier leaders that go on, asked once before the first start.
        """
        alone_s = self._options.alone_s
        async with self._places:
            await self.begin(keep)
            arguments = () if alone_s is None else ("--alone-s", f"{alone_s:g}")
            return await self.listening(name, arguments, self._options.of_base(base).size)

    async def connect(
        self,
        address: AgentAddress,
        epoch: int = ONLY_EPOCH,
        order: ServeOrder | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> AgentLink:
        """Connect to an agent; see `open_agent`."""
        return await open_agent(address, self.access(epoch), order, end)
