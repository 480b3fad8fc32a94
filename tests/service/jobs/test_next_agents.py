"""Agents that wait for the next attempt of a job: which of them is handed over, and which are ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.training_nodes import TrainingNodes
from tests.support.waiting import until_async
from tuneship.agents.launchers import AgentSize
from tuneship.host.thread_pools import Threads
from tuneship.service.jobs import next_agents as next_agents_module
from tuneship.service.jobs.next_agents import NextAgents

JOB, BASE = "job", Path("/models/tiny")
SIZE = AgentSize(cpus=1, gpus=0, memory_bytes=0)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingNodes:
    return TrainingNodes(tmp_path / "nodes", monkeypatch)


@asynccontextmanager
async def next_agents(nodes: TrainingNodes) -> AsyncIterator[NextAgents]:
    stands_for_them: Any = nodes
    agents = NextAgents(stands_for_them, Threads("test", 1))
    try:
        yield agents
    finally:
        await agents.stop()
        for node in nodes.nodes:
            await node.close()


async def waiting(nodes: TrainingNodes, number: int = 0) -> object:
    """Wait until a process waits for its order."""
    await until_async(lambda: len(nodes.engines.trainers) > number)
    return nodes.trainer(number)


async def lose(nodes: TrainingNodes, agents: NextAgents, number: int) -> None:
    """Have the node of a waiting agent fail, or wait until the start of one has failed."""
    if nodes.has_room:
        await waiting(nodes, number)
        await nodes.nodes[number].close()
    await until_async(lambda: not next_agents_module._is_of_use(agents._waiting[JOB]))


def test_it_is_handed_over_once_and_then_it_is_no_matter_of_ours(nodes: TrainingNodes) -> None:
    async def run() -> None:
        async with next_agents(nodes) as agents:
            assert await agents.take(JOB) is None
            agents.prepare(JOB, BASE, SIZE)
            agents.prepare(JOB, BASE, SIZE)
            agent = await agents.take(JOB)
            assert agent is not None
            assert agent.name == "0"
            assert await agents.take(JOB) is None
            agents.drop(JOB)
            await agents.stop()
            assert not nodes.nodes[0].agent.over.is_set()
            assert len(nodes.nodes) == 1

    asyncio.run(run())


@pytest.mark.parametrize("has_room", [True, False])
def test_one_that_is_lost_or_cannot_start_is_not_handed_over_and_the_next_call_starts_another(
    nodes: TrainingNodes, has_room: bool
) -> None:
    async def run() -> None:
        async with next_agents(nodes) as agents:
            nodes.has_room = has_room
            agents.prepare(JOB, BASE, SIZE)
            await lose(nodes, agents, 0)
            assert await agents.take(JOB) is None
            agents.prepare(JOB, BASE, SIZE)
            await lose(nodes, agents, 1)
            nodes.has_room = True
            before = len(nodes.nodes)
            agents.prepare(JOB, BASE, SIZE)
            agent = await agents.take(JOB)
            assert agent is not None
            assert agent.name == str(before)

    asyncio.run(run())


def test_one_that_nobody_takes_is_ended(
    nodes: TrainingNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        loop, ends = asyncio.get_running_loop(), list[Callable[[], object]]()
        later = loop.call_later

        def call_later(delay: float, call: Callable[..., object], *arguments: Any) -> object:
            if isinstance(getattr(call, "__self__", None), NextAgents):
                return ends.append(partial(call, *arguments))
            return later(delay, call, *arguments)

        monkeypatch.setattr(loop, "call_later", call_later)
        async with next_agents(nodes) as agents:
            agents.prepare(JOB, BASE, SIZE)
            await waiting(nodes)
            agents.drop(JOB)
            await nodes.nodes[0].agent.over.wait()
            agents.prepare(JOB, BASE, SIZE)
            await waiting(nodes, 1)
            (of_the_first, of_the_second) = ends
            of_the_first()
            assert JOB in agents._waiting
            of_the_second()
            await nodes.nodes[1].agent.over.wait()
            assert await agents.take(JOB) is None

    asyncio.run(run())


def test_one_that_is_ended_while_it_is_taken_is_not_handed_over(nodes: TrainingNodes) -> None:
    async def run() -> None:
        async with next_agents(nodes) as agents:
            agents.prepare(JOB, BASE, SIZE)
            await asyncio.wait([agents._waiting[JOB]])
            taking = asyncio.create_task(agents.take(JOB))
            await asyncio.sleep(0)
            agents.drop(JOB)
            assert await taking is None
            await nodes.nodes[0].agent.over.wait()

    asyncio.run(run())
