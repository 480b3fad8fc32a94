"""A replica that stands still, or whose connection nobody reads any more, keeps nobody waiting for ever."""

import asyncio
from pathlib import Path

import pytest

from tests.support.engines import PlayedEngines
from tests.support.waiting import PATIENCE_S, until_async
from tuneship.replicas.local_replicas import ReplicaSet, replica_process
from tuneship.replicas.replica_groups import ReplicaPool
from tuneship.replicas.replica_link import Adapter
from tuneship.serving.replica_client import ReplicaLine, ReplicaLost


@pytest.fixture
def pool(engines: PlayedEngines, tmp_path: Path) -> ReplicaPool:
    return ReplicaPool(replica_process(engines), tmp_path)


def replica_set(pool: ReplicaPool, base: Path) -> ReplicaSet:
    group = pool.of(base)
    assert isinstance(group, ReplicaSet)
    return group


async def hang(group: ReplicaSet, engines: PlayedEngines) -> None:
    await group.ready(None)
    engines.replicas[0].hangs = True


def test_a_cancelled_load_of_a_model_on_it_has_stopped(
    pool: ReplicaPool, engines: PlayedEngines, tmp_path: Path
) -> None:
    """The adapter is loaded, and its check waits for a token when the service ends."""

    async def run() -> None:
        group = replica_set(pool, tmp_path)
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
            await pool.close()

    asyncio.run(run())


def test_an_answer_is_waited_for_a_limited_time(engines: PlayedEngines, tmp_path: Path) -> None:
    async def run() -> None:
        impatient = replica_process(engines, answer_timeout_s=0.2)
        group = ReplicaSet(impatient, tmp_path, tmp_path / "replica.log")
        await hang(group, engines)
        with pytest.raises(ReplicaLost):
            await group.ready(Adapter("ft:m", tmp_path))
        await group.unload("ft:m")
        await group.close()

    asyncio.run(run())


def test_a_check_is_waited_for_a_limited_time(
    pool: ReplicaPool, engines: PlayedEngines, tmp_path: Path
) -> None:
    async def run() -> None:
        group = replica_set(pool, tmp_path)
        await hang(group, engines)
        with pytest.raises(ReplicaLost, match="did not make a token in time"):
            await group.live[0].check(None, patience_s=0.2)
        await pool.close()

    asyncio.run(run())


def test_a_line_that_nobody_reads_answers_nobody(
    pool: ReplicaPool, engines: PlayedEngines, tmp_path: Path
) -> None:
    """Cancelling every task of the event loop, whatever it does, has the same effect."""

    async def run() -> None:
        group = replica_set(pool, tmp_path)
        await group.ready(None)
        link = group.live[0].link
        assert isinstance(link, ReplicaLine)
        link._read_task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([link._read_task])
            assert link.is_lost
            with pytest.raises(ReplicaLost):
                await link.unload("ft:m")
        await pool.close()

    asyncio.run(run())
