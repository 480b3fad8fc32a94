"""How agents of trainings are started."""

import asyncio
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from tests.support.cluster.agents import AUTHORITY
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.launchers import AgentSize, AgentState
from tuneship.agents.training_agents import ALONE_S, TrainingAgents
from tuneship.agents.training_protocol import GONE_S

ADDRESS = AgentAddress("127.0.0.1", 20_000, "0" * 64)
SIZE = AgentSize(cpus=2, gpus=1, memory_bytes=1 << 30)


class FakeLauncher:
    """Says at once that an agent listens. Obeys `Launcher`."""

    is_here = True

    def __init__(self) -> None:
        self.started = dict[str, Sequence[str]]()
        self.sizes = list[AgentSize | None]()

    async def start(
        self, name: str, arguments: Sequence[str], size: AgentSize | None = None
    ) -> None:
        self.started[name] = arguments
        self.sizes.append(size)

    async def state(self, name: str) -> AgentState:
        assert name in self.started
        return AgentState(ADDRESS.ready_line())

    async def end(self, name: str) -> None:
        raise AssertionError("it goes on")

    async def begin(self, prefix: str, keep: Collection[str] = ()) -> None:
        assert not keep


def test_one_whose_leader_is_gone_ends_soon_after_its_lease_though_it_has_no_order() -> None:
    async def run() -> None:
        launcher = FakeLauncher()
        agents = TrainingAgents(
            launcher, AUTHORITY, "t-", lambda: datetime.now(UTC), isolated=False, start_timeout_s=60
        )
        agent = await agents.start(SIZE)
        assert agent.address == ADDRESS
        assert launcher.sizes == [SIZE]
        arguments = launcher.started[agent.name]
        limit = arguments[arguments.index("--alone-s") + 1]
        assert float(limit) == ALONE_S > GONE_S

    asyncio.run(run())
