"""Opens replicas that agents run: starts an agent, reads where it listens, connects, and orders the replica.

Implements `OpenReplica` of `replica_protocol.py`, so a group starts, watches, drains and replaces them like others.
"""

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.runtime.agent_link import AgentAccess, open_agent
from tuneship.runtime.agent_protocol import AgentAddress, ServeOrder
from tuneship.runtime.base_digest import BaseDigests
from tuneship.runtime.certificates import AgentAuthority
from tuneship.runtime.launchers import CannotLaunch, Launcher
from tuneship.runtime.replica_protocol import OpenedReplica
from tuneship.serving.replica_client import ReplicaLost

logger = logging.getLogger(__name__)

# Ray gets slow when many jobs wait for a node.
STARTING_AT_ONCE = 4
POLL_S = 0.1
# A service leads alone for now: there is one for each database.
ONLY_EPOCH = 1


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


class AgentWorker:
    """Stands for the process, which ends with the agent when its link is closed. Obeys `Worker`."""

    def __init__(self, pid: int) -> None:
        """`pid`: process id of the replica on its node."""
        self.pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Return None until it was ended: that an agent ends by itself is known from its link."""
        return self._code

    def stop(self) -> None:
        """Note that it was ended."""
        self._code = -signal.SIGTERM

    def kill(self) -> None:
        """Note that it was ended."""
        self._code = -signal.SIGKILL


class AgentReplicas:
    """Opens replicas on agents. Obeys `OpenReplica`."""

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
        self.is_here = launcher.is_here
        self._authority = authority
        self._installation = installation
        self._options = options
        self._clock = clock
        self._digests = BaseDigests()
        self._threads = Threads("digest of a base model", 1)
        self._places = asyncio.Semaphore(STARTING_AT_ONCE)
        self._first = asyncio.Lock()
        self._has_begun = False

    async def __call__(self, base: Path, log: Path) -> OpenedReplica:  # noqa: ARG002 - the agent's output is elsewhere
        """Return when the base model is loaded. Raises `ServingError`, and `OSError` if the model cannot be read."""
        order = self._order(base, await self._threads.run(self._digests.of, base))
        name = f"{self._installation}-{secrets.token_hex(6)}"
        end = partial(self._end, name)
        try:
            async with self._places:
                address = await self._start(name)
            access = AgentAccess(
                self._authority.client_context(self._clock()), ONLY_EPOCH, version("tuneship")
            )
            link = await open_agent(address, access, order, end)
        except CannotLaunch as error:
            await end()
            raise ReplicaLost(f"no agent can be started: {error}") from error
        except BaseException:  # refused, lost or cancelled: leave no agent behind
            await end()
            raise
        return OpenedReplica(AgentWorker(link.facts.pid), link)

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

    async def _start(self, name: str) -> AgentAddress:
        """Start an agent and wait until it listens. Raises `CannotLaunch`."""
        await self._begin()
        await self._launcher.start(name, ("--trust", self._authority.trusted))
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                while True:
                    state = await self._launcher.state(name)
                    if (address := AgentAddress.said_in(state.said)) is not None:
                        return address
                    if state.has_ended:
                        raise CannotLaunch("the agent ended before it listened; its log says why")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            text = f"no node had room within {self._options.start_timeout_s:g} s"
            raise CannotLaunch(text) from None

    async def _begin(self) -> None:
        """Prepare the launcher before the first start. No other service works with this installation."""
        async with self._first:
            if not self._has_begun:
                await self._launcher.begin(f"{self._installation}-")
                self._has_begun = True

    async def _end(self, name: str) -> None:
        """End an agent; one that its launcher cannot end now ends by itself, since nobody connects to it."""
        try:
            await self._launcher.end(name)
        except CannotLaunch as error:
            logger.warning("an agent could not be ended and will end by itself: %s", error)
