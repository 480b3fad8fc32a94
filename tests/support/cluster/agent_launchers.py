"""A launcher whose agents run in the test's event loop, with played replicas."""

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path

from tests.support.cluster.agents import PlayedAgent, played_agent
from tests.support.service.engines import PlayedEngines
from tuneship.agents.launchers import AgentSize, AgentState, CannotLaunch


class PlayedLauncher:
    """Starts agents that outlive who has started them. Obeys `Launcher`."""

    is_here = True

    def __init__(self, engines: PlayedEngines, folder: Path, opened: AsyncExitStack) -> None:
        """`opened` ends all agents at the end of the test."""
        self._engines = engines
        self._folder = folder
        self._opened = opened
        self.agents: dict[str, PlayedAgent] = {}
        # The agents that each leader wanted to keep when it first started one.
        self.kept: list[set[str]] = []
        # Why no agent can be started now.
        self.fault = ""

    async def start(
        self, name: str, arguments: Sequence[str], size: AgentSize | None = None
    ) -> None:
        if self.fault:
            raise CannotLaunch(self.fault)
        place = self._folder / name
        place.mkdir()
        agent = played_agent(self._engines, place, version("tuneship"))
        self.agents[name] = await self._opened.enter_async_context(agent)

    async def state(self, name: str) -> AgentState:
        agent = self.agents[name]
        return AgentState(agent.address.ready_line(), agent.relay.over.is_set())

    async def end(self, name: str) -> None:
        if name in self.agents:
            self.agents[name].relay.over.set()

    async def begin(self, prefix: str, keep: Collection[str] = ()) -> None:
        self.kept.append({*keep})

    @property
    def live(self) -> set[str]:
        return {name for name, agent in self.agents.items() if not agent.relay.over.is_set()}
