"""Starts agents with a launcher, reads the addresses on which they listen, and ends them, whatever they run.

For replicas: `agent_starter.py`; for trainings: `training_agents.py`.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from tuneship.agents.agent_link import AgentAccess
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.launchers import AgentSize, CannotLaunch, Launcher

if TYPE_CHECKING:  # it loads X.509
    from tuneship.agents.certificates import AgentAuthority

logger = logging.getLogger(__name__)

# Between two looks at a starting agent. They get longer with the time that it takes, by a tenth: it may wait for room
# on a node for minutes, and each look is two calls of Ray.
POLL_S = 0.1
LONGEST_POLL_S = 1.0
# For an agent that obeys nobody but the service that has started it.
ONLY_EPOCH = 1


class ListeningAgents:
    """Agents of one launcher under a common name prefix; subclasses decide what the agents run."""

    def __init__(
        self,
        launcher: Launcher,
        authority: "AgentAuthority",
        prefix: str,
        clock: Callable[[], datetime],
        start_timeout_s: float,
    ) -> None:
        """`prefix`: all these agents' names begin with it, and no other agent's.

        `start_timeout_s`: time limit until an agent listens.
        """
        self._launcher = launcher
        self._authority = authority
        self._prefix = prefix
        self._clock = clock
        self._start_timeout_s = start_timeout_s
        self._first = asyncio.Lock()
        self._has_begun = False

    def new_name(self) -> str:
        """A name that no agent has had."""
        return f"{self._prefix}{secrets.token_hex(6)}"

    async def begin(self, keep: Callable[[], Collection[str]] = tuple) -> None:
        """Prepare the launcher before the first start. Raises `CannotLaunch`.

        `keep`: the agents of an earlier service that go on, asked once.
        """
        async with self._first:
            if not self._has_begun:
                await self._launcher.begin(self._prefix, keep())
                self._has_begun = True

    async def listening(
        self, name: str, arguments: Sequence[str], size: AgentSize | None = None
    ) -> AgentAddress:
        """Start an agent and wait until it listens. Raises `CannotLaunch`, and may leave an agent behind."""
        trust = ("--trust", self._authority.trusted)
        await self._launcher.start(name, (*trust, *arguments), size)
        pause_s = POLL_S
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while True:
                    state = await self._launcher.state(name)
                    if (address := AgentAddress.said_in(state.said)) is not None:
                        return address
                    if state.has_ended:
                        raise CannotLaunch("the agent ended before it listened; its log says why")
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_POLL_S, 1.1 * pause_s)
        except TimeoutError:
            text = f"no node had room within {self._start_timeout_s:g} s"
            raise CannotLaunch(text) from None

    def access(self, epoch: int = ONLY_EPOCH) -> AgentAccess:
        """The credentials for one connection. `epoch`: counts for a leader alone."""
        context = self._authority.client_context(self._clock())
        return AgentAccess(context, epoch, version("tuneship"))

    async def end(self, name: str) -> None:
        """End an agent. If its launcher cannot do so now, the agent ends by itself, since its service no longer
        connects.
        """
        try:
            await self._launcher.end(name)
        except CannotLaunch as error:
            logger.warning("an agent could not be ended and will end by itself: %s", error)
