"""An adapter's files are held while a replica loads them, and by nobody when the loading was cancelled."""

import asyncio
import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.engines import PlayedEngines
from tests.support.waiting import PATIENCE_S, until_async
from tuneship.replicas.local_replicas import LocalReplicas
from tuneship.replicas.replica_link import Adapter


class SlowFiles:
    """Files whose download ends when the test lets it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.may_arrive = threading.Event()
        # The name of the thread of each download.
        self.threads: list[str] = []
        self.events: list[str] = []
        self.failure: OSError | None = None

    @contextmanager
    def hold(self) -> Generator[Path]:
        self.threads.append(threading.current_thread().name)
        assert self.may_arrive.wait(PATIENCE_S)
        if self.failure is not None:
            self.events.append("failed")
            raise self.failure
        self.events.append("held")
        yield self._path
        self.events.append("released")


@pytest.fixture
def files(tmp_path: Path) -> Generator[SlowFiles]:
    made = SlowFiles(tmp_path)
    yield made
    made.may_arrive.set()


async def cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_files_are_held_until_they_are_loaded_by_a_thread_of_their_own(
    group: LocalReplicas, engines: PlayedEngines, files: SlowFiles, tmp_path: Path
) -> None:
    async def run() -> None:
        files.may_arrive.set()
        await group.ready(Adapter("ft:m", tmp_path, hold=files.hold))
        assert engines.replicas[0].adapters == {"ft:m"}
        assert files.events == ["held", "released"]
        assert [name.startswith("files of an adapter") for name in files.threads] == [True]
        await group.close()

    asyncio.run(run())


def test_files_that_arrive_after_a_cancellation_are_released(
    group: LocalReplicas, engines: PlayedEngines, files: SlowFiles, tmp_path: Path
) -> None:
    async def run() -> None:
        await group.ready(None)
        adapter = Adapter("ft:m", tmp_path, hold=files.hold)
        loading = asyncio.create_task(group.ready(adapter))
        await until_async(lambda: files.threads)
        await cancel(loading)
        assert files.events == []
        files.may_arrive.set()
        await until_async(lambda: files.events == ["held", "released"])
        assert engines.replicas[0].adapters == set()
        await group.ready(adapter)
        assert engines.replicas[0].adapters == {"ft:m"}
        assert files.events == ["held", "released"] * 2
        await group.close()

    asyncio.run(run())


def test_an_abandoned_download_fails_in_silence(
    group: LocalReplicas, files: SlowFiles, tmp_path: Path
) -> None:
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await group.ready(None)
        files.failure = OSError("the disk is full")
        loading = asyncio.create_task(group.ready(Adapter("ft:m", tmp_path, hold=files.hold)))
        await until_async(lambda: files.threads)
        await cancel(loading)
        files.may_arrive.set()
        await until_async(lambda: files.events == ["failed"])
        await group.close()

    asyncio.run(run())
    gc.collect()
    assert errors == []


def test_a_download_that_nobody_wants_any_more_does_not_begin(
    group: LocalReplicas, files: SlowFiles, tmp_path: Path
) -> None:
    async def run() -> None:
        await group.ready(None)
        adapter = Adapter("ft:m", tmp_path, hold=files.hold)
        for _ in range(3):
            loading = asyncio.create_task(group.ready(adapter))
            await until_async(lambda: files.threads)
            # The new attempt reaches the place where it waits for the thread of the first.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await cancel(loading)
        files.may_arrive.set()
        await group.ready(adapter)
        assert len(files.threads) == 2
        await group.close()

    asyncio.run(run())
