"""Starts the agents of trainings, each under a name of its own, and ends them."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version

from tuneship.runtime.agent_link import AgentAccess
from tuneship.runtime.agent_protocol import AgentAddress
from tuneship.runtime.certificates import AgentAuthority
from tuneship.runtime.launchers import CannotLaunch, Launcher
from tuneship.runtime.training_protocol import TRAIN

logger = logging.getLogger(__name__)

POLL_S = 0.1
# An agent obeys one leader, which started it: the next one starts another.
ONLY_EPOCH = 1


@dataclass(frozen=True)
class TrainingAgent:
    """An agent that listens."""

    name: str
    address: AgentAddress


class TrainingAgents:
    """Starts agents on a launcher of their own."""

    def __init__(
        self,
        launcher: Launcher,
        authority: AgentAuthority,
        prefix: str,
        clock: Callable[[], datetime],
        *,
        isolated: bool,
        start_timeout_s: float,
    ) -> None:
        """`prefix`: begins the names of all its agents, and of no others.

        `isolated`: whether a process that its node cannot isolate must not start. `start_timeout_s`: until an agent
        must listen.
        """
        self._launcher = launcher
        self._authority = authority
        self._prefix = prefix
        self._clock = clock
        self.isolated = isolated
        self._start_timeout_s = start_timeout_s
        self._first = asyncio.Lock()
        self._has_begun = False

    @property
    def end_with_service(self) -> bool:
        """Whether they are processes of this machine, which end when the service does."""
        return self._launcher.is_here

    async def start(self) -> TrainingAgent:
        """Start an agent and wait until it listens. Leaves none behind when it raises `CannotLaunch`."""
        name = f"{self._prefix}{secrets.token_hex(6)}"
        async with self._first:
            if not self._has_begun:
                await self._launcher.begin(self._prefix)
                self._has_begun = True
        try:
            arguments = ("--trust", self._authority.trusted, "--kind", TRAIN)
            await self._launcher.start(name, arguments)
            async with asyncio.timeout(self._start_timeout_s):
                return TrainingAgent(name, await self._listening(name))
        except BaseException as error:
            await self.end(name)
            if isinstance(error, TimeoutError):
                text = f"no node had room within {self._start_timeout_s:g} s"
                raise CannotLaunch(text) from None
            raise

    async def _listening(self, name: str) -> AgentAddress:
        while True:
            state = await self._launcher.state(name)
            if (address := AgentAddress.said_in(state.said)) is not None:
                return address
            if state.has_ended:
                raise CannotLaunch("the agent ended before it listened; its log says why")
            await asyncio.sleep(POLL_S)

    def access(self) -> AgentAccess:
        """Credentials for one connection."""
        context = self._authority.client_context(self._clock())
        return AgentAccess(context, ONLY_EPOCH, version("tuneship"))

    async def end(self, name: str) -> None:
        """End an agent; one that its launcher cannot end now ends by itself when its lease is over."""
        try:
            await self._launcher.end(name)
        except CannotLaunch as error:
            logger.warning("an agent could not be ended and will end by itself: %s", error)
