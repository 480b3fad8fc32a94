"""A member of a cluster asks replicas that the leader has started, attaches to new ones, and lets the others go."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster.agents import PlayedAgent, access, played_agent
from tests.support.service.engines import PlayedEngines
from tests.support.waiting import until_async
from tuneship.agents.agent_link import AgentLink, open_agent
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.agent_replicas import AgentReplicas, ReadyAgent, ReplicaOrders
from tuneship.replicas.replica_link import Adapter, NoReplica, NotStartedYet
from tuneship.serving.replica_client import GenerateRequest, ReplicaLost

BASE = Path("base")
REQUEST = GenerateRequest(tokens=(7,), max_tokens=2, adapter=None)


async def attach(address: AgentAddress) -> AgentLink:
    return await open_agent(address, access(), None)


class Stage:
    """Agents that a leader has started, and the group of one member."""

    def __init__(self, agents: list[PlayedAgent], leads: bool) -> None:
        self.agents = agents
        self.orders = ReplicaOrders(lambda: leads)
        self.group = AgentReplicas(BASE, self.orders, attach, look_every_s=0.01)

    def listed(self, *numbers: int) -> list[ReadyAgent]:
        return [ReadyAgent(f"a-{one}", one, self.agents[one].address) for one in numbers]

    async def follow(self, *numbers: int) -> None:
        self.group.follow(self.listed(*numbers))
        await self.group.first_attached()

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.group.live]

    async def text(self, adapter: Adapter | None = None) -> list[int]:
        request = replace(REQUEST, adapter=None if adapter is None else adapter.name)
        return await (await self.group.generate(adapter, request)).read_all()


def playing(
    engines: PlayedEngines,
    folder: Path,
    act: Callable[[Stage], Awaitable[None]],
    *,
    leads: bool = False,
) -> None:
    async def run() -> None:
        async with AsyncExitStack() as opened:
            agents = list[PlayedAgent]()
            for number in range(2):
                place = folder / str(number)
                place.mkdir()
                agent = await opened.enter_async_context(played_agent(engines, place))
                await agent.lead()
                agents.append(agent)
            stage = Stage(agents, leads)
            try:
                await act(stage)
            finally:
                await stage.group.close()

    asyncio.run(run())


def adapter_in(folder: Path) -> Adapter:
    path = folder / "adapter"
    path.mkdir()
    (path / "weights").write_bytes(b"x")
    return Adapter("ft:m", path)


def test_it_asks_those_that_are_listed_and_lets_the_others_finish(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(stage: Stage) -> None:
        await stage.follow(0, 1)
        assert stage.numbers == [0, 1]
        engines.may_answer.clear()
        asked = [await stage.group.generate(None, REQUEST) for _ in range(2)]
        assert [one.link.in_flight for one in stage.group.live] == [1, 1]
        await stage.follow(1)
        assert stage.numbers == [1]
        later = await stage.group.generate(None, REQUEST)
        assert [one.link.in_flight for one in stage.group.live] == [2]
        engines.may_answer.set()
        assert [await one.read_all() for one in (*asked, later)] == [[5, 6]] * 3
        events = list[str]()

        def has_ended() -> bool:
            events.extend(event.message for event in stage.group.take_events())
            return "replica ended" in events

        await until_async(has_ended)
        assert not any(agent.relay.over.is_set() for agent in stage.agents)

    playing(engines, tmp_path, act)


def test_a_connection_that_broke_is_made_again(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(stage: Stage) -> None:
        await stage.follow(0)
        (replica,) = stage.group.live
        await replica.link.aclose()
        assert stage.numbers == []
        await stage.follow(0)
        assert stage.numbers == [0]
        assert await stage.text() == [5, 6]

    playing(engines, tmp_path, act)


def test_an_agent_that_does_not_answer_is_tried_again_later(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(stage: Stage) -> None:
        gone = ReadyAgent("gone", 7, AgentAddress("127.0.0.1", 1, "0" * 64))
        stage.group.follow([gone, *stage.listed(1)])
        await stage.group.first_attached()
        await until_async(lambda: stage.numbers == [1])
        stage.group.follow(stage.listed(0, 1))
        await until_async(lambda: stage.numbers == [0, 1])

    playing(engines, tmp_path, act)


def test_the_requests_of_others_count(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(stage: Stage) -> None:
        await stage.follow(0, 1)
        engines.may_answer.clear()
        other = await stage.agents[0].attach()
        theirs = [other.generate(REQUEST) for _ in range(3)]
        await until_async(lambda: len(engines.replicas[0].running) == 3)
        stage.agents[0].relay.send_heartbeat()
        await until_async(lambda: stage.group.live[0].busy == 3)
        ours = [await stage.group.generate(None, REQUEST) for _ in range(3)]
        assert [one.link.in_flight for one in stage.group.live] == [0, 3]
        engines.may_answer.set()
        for one in (*ours, *theirs):
            await one.read_all()

    playing(engines, tmp_path, act)


def test_an_adapter_the_leader_unloaded_is_loaded_again_for_the_next_request(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    adapter = adapter_in(tmp_path)

    async def act(stage: Stage) -> None:
        await stage.follow(0, 1)
        await stage.group.ready(adapter)
        assert stage.group.answering("ft:m") == 2
        for agent in stage.agents:
            leader = await agent.lead()
            await leader.unload("ft:m")
        with pytest.raises(ReplicaLost):
            await stage.text(adapter)
        assert await stage.text(adapter) == [5, 6]
        assert all(one.adapters == {"ft:m"} for one in engines.replicas)

    playing(engines, tmp_path, act)


def test_a_new_one_has_the_adapters_that_it_will_be_asked_for(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    adapter = adapter_in(tmp_path)

    async def act(stage: Stage) -> None:
        await stage.follow(0)
        await stage.group.ready(adapter)
        await stage.follow(0, 1)
        assert stage.group.serving("ft:m") == [0, 1]

    playing(engines, tmp_path, act)


def test_elsewhere_than_at_the_leader_only_requests_wait_for_a_replica(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(stage: Stage) -> None:
        needs = list[bool]()
        stage.orders.on_need = lambda: needs.append(True)
        with pytest.raises(NotStartedYet):
            await stage.group.ready(None)
        assert needs == []
        waiting = asyncio.create_task(stage.text())
        await until_async(lambda: needs)
        assert stage.orders.wanted == {}
        await stage.follow(1)
        assert await waiting == [5, 6]

    playing(engines, tmp_path, act)


def test_the_leader_orders_what_is_missing_and_hears_of_failures(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(stage: Stage) -> None:
        orders, group = stage.orders, stage.group
        waiting = asyncio.create_task(group.ready(None, 2))
        await until_async(lambda: orders.wanted == {BASE: 2})
        orders.note_failure(BASE, "no room")
        group.report_failure("no room")
        with pytest.raises(NoReplica, match="no room"):
            await waiting
        with pytest.raises(NoReplica, match="now: no room"):  # at once, until the next start
            await stage.text()
        assert [one.message for one in group.take_events()] == ["replica not started: no room"]
        orders.note_success(BASE)
        waiting = asyncio.create_task(group.ready(None, 2))
        await stage.follow(0)
        orders.note_failure(BASE, "no room")  # one is enough to go on with
        await waiting
        group.resize(0, {})
        assert orders.wanted == {BASE: 0}

    playing(engines, tmp_path, act, leads=True)


class PlayedKeeper:
    """A keeper that notes what it is asked for."""

    def __init__(self, agents: list[PlayedAgent]) -> None:
        self._agents = agents
        self.replaced = list[str]()

    async def unload(self, replica: str, adapter: str) -> None:
        link = await self._agents[int(replica[-1])].lead()
        await link.unload(adapter)

    def replace(self, replica: str) -> None:
        self.replaced.append(replica)


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_unloads_and_replaces(
    engines: PlayedEngines, tmp_path: Path, leads: bool
) -> None:
    adapter = adapter_in(tmp_path)

    async def act(stage: Stage) -> None:
        keeper = PlayedKeeper(stage.agents)
        stage.orders.keeper = keeper if leads else None
        await stage.follow(0, 1)
        await stage.group.ready(adapter)
        await stage.group.unload("ft:m")
        assert [one.adapters for one in engines.replicas] == [set() if leads else {"ft:m"}] * 2
        assert stage.group.answering("ft:m") == 0
        engines.replicas[0].hangs = True
        for _ in range(6):
            await stage.group.probe(0.02)
        assert keeper.replaced == (["a-0"] if leads else [])

    playing(engines, tmp_path, act, leads=leads)
