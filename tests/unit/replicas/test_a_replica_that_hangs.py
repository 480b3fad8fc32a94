"""A replica that stands still, or whose connection nobody reads any more, keeps nobody waiting for ever."""

import asyncio
from pathlib import Path

import pytest

from tests.support.service.engines import PlayedEngines
from tests.support.waiting import PATIENCE_S, until_async
from tuneship.replicas.local_replicas import LocalReplicas, process_starter
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.replicas.replica_link import Adapter
from tuneship.serving.replica_client import ReplicaLost, SocketLink


@pytest.fixture
def groups(engines: PlayedEngines, tmp_path: Path) -> ReplicaGroups:
    return ReplicaGroups(process_starter(engines), tmp_path)


def group_of(groups: ReplicaGroups, base: Path) -> LocalReplicas:
    group = groups.of(base)
    assert isinstance(group, LocalReplicas)
    return group


async def hang(group: LocalReplicas, engines: PlayedEngines) -> None:
    await group.ready(None)
    engines.replicas[0].hangs = True


def test_a_cancelled_load_of_a_model_on_it_has_stopped(
    groups: ReplicaGroups, engines: PlayedEngines, tmp_path: Path
) -> None:
    """The adapter is loaded, and its check waits for a token when the service ends."""

    async def run() -> None:
        group = group_of(groups, tmp_path)
        await group.ready(None)
        adapter = Adapter("ft:m", tmp_path)
        engines.hangs_after_loading = True
        async with asyncio.timeout(60):
            task = asyncio.create_task(group.ready(adapter))
            # The running generation is the check of the adapter.
            await until_async(lambda: group.live[0].link.in_flight)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await groups.close()

    asyncio.run(run())


def test_an_answer_is_waited_for_a_limited_time(engines: PlayedEngines, tmp_path: Path) -> None:
    async def run() -> None:
        impatient = process_starter(engines, answer_timeout_s=0.2)
        group = LocalReplicas(impatient, tmp_path, tmp_path / "replica.log")
        await hang(group, engines)
        with pytest.raises(ReplicaLost):
            await group.ready(Adapter("ft:m", tmp_path))
        await group.unload("ft:m")
        await group.close()

    asyncio.run(run())


def test_a_check_is_waited_for_a_limited_time(
    groups: ReplicaGroups, engines: PlayedEngines, tmp_path: Path
) -> None:
    async def run() -> None:
        group = group_of(groups, tmp_path)
        await hang(group, engines)
        with pytest.raises(ReplicaLost, match="did not make a token in time"):
            await group.live[0].check(None, patience_s=0.2)
        await groups.close()

    asyncio.run(run())


def test_a_line_that_nobody_reads_answers_nobody(
    groups: ReplicaGroups, engines: PlayedEngines, tmp_path: Path
) -> None:
    """Cancelling every task of the event loop, whatever it does, has the same effect."""

    async def run() -> None:
        group = group_of(groups, tmp_path)
        await group.ready(None)
        link = group.live[0].link
        assert isinstance(link, SocketLink)
        link._read_task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([link._read_task])
            assert link.is_lost
            with pytest.raises(ReplicaLost):
                await link.unload("ft:m")
        await groups.close()

    asyncio.run(run())
