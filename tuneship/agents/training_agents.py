"""Starts the agents of trainings, each under its own name, and ends them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.launchers import AgentSize, Launcher
from tuneship.agents.listening_agents import ListeningAgents
from tuneship.agents.training_protocol import TRAIN

if TYPE_CHECKING:  # it loads X.509
    from tuneship.agents.certificates import AgentAuthority

# The limit until an agent that no leader is connected to ends: a training would have lost its lease long before.
ALONE_S = 60.0


@dataclass(frozen=True)
class TrainingAgent:
    """A started training agent: its name, address and size."""

    name: str
    address: AgentAddress
    size: AgentSize


class TrainingAgents(ListeningAgents):
    """Starts agents on a launcher of their own. Each belongs to the leader that started it; a new leader starts new
    ones.
    """

    def __init__(
        self,
        launcher: Launcher,
        authority: "AgentAuthority",
        prefix: str,
        clock: Callable[[], datetime],
        *,
        isolated: bool,
        start_timeout_s: float,
    ) -> None:
        """`isolated`: whether a process must not start if its node cannot isolate it."""
        super().__init__(launcher, authority, prefix, clock, start_timeout_s)
        self.isolated = isolated

    @property
    def end_with_service(self) -> bool:
        """Whether they are processes of this machine, which end when the service does."""
        return self._launcher.is_here

    async def start(self, size: AgentSize) -> TrainingAgent:
        """Start an agent and wait until it listens. Raises `CannotLaunch`, and then leaves no agent behind."""
        await self.begin()
        name, options = self.new_name(), ("--kind", TRAIN, "--alone-s", f"{ALONE_S:g}")
        try:
            return TrainingAgent(name, await self.listening(name, options, size), size)
        except BaseException:
            await self.end(name)
            raise
