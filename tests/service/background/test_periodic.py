"""Periodic work takes a thread only when there is something to do, and is done once more at the end."""

import asyncio
from contextlib import suppress
from threading import Thread, current_thread, main_thread

import pytest

from tests.support.service.in_process import Service
from tuneship.service.background.periodic import Periodic


def test_work_that_is_not_needed_starts_no_thread() -> None:
    asyncio.run(_needed_later())


async def _needed_later() -> None:
    done, needed = list[bool](), False
    looked, worked = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def is_needed() -> bool:
        looked.set()
        return needed

    def work() -> None:
        done.append(current_thread() is not main_thread())
        loop.call_soon_threadsafe(worked.set)

    running = asyncio.create_task(Periodic(work, 0.01, "it failed", is_needed).run())
    await looked.wait()
    assert done == []
    needed = True
    await worked.wait()
    assert all(done)
    before = len(done)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert len(done) > before


def test_an_idle_service_starts_no_thread_to_store_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[str]()
    start = Thread.start

    def noted(thread: Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(Thread, "start", noted)
    # Its loop has the pace of the one that stores.
    service.until(lambda: sum(name.startswith("deployment records") for name in started) >= 3)
    assert [name for name in started if "RecordKeeper._store" in name] == []
