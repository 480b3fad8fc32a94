"""Tenants take turns at the threads, and no tenant has all of them."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.service.in_process import Service
from tests.support.waiting import PATIENCE_S, until_async
from tuneship.contract.errors import InternalError, RateLimitExceeded
from tuneship.service.context.fair_threads import FairThreads
from tuneship.service.context.request_slots import InFlightLimits


class Held:
    """Work that lasts until it is released, and a list of who began when."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.may_end.wait(PATIENCE_S)
        return name


def played(test: Callable[[Held], Awaitable[None]]) -> None:
    async def run() -> None:
        held = Held()
        try:
            await test(held)
        finally:
            held.may_end.set()

    asyncio.run(run())


NAMES = [*(f"a{number}" for number in range(6)), "b0", "b1", "c0"]


def test_one_tenant_never_has_all_threads() -> None:
    async def run(held: Held) -> None:
        turns = FairThreads("test", threads=3, each=2)
        tasks = [asyncio.create_task(turns.run(name[0], held.work, name)) for name in NAMES]
        await until_async(lambda: len(held.begun) == 3)
        assert set(held.begun) == {"a0", "a1", "b0"}
        held.may_end.set()
        assert await asyncio.gather(*tasks) == NAMES
        await until_async(lambda: turns.is_idle)

    played(run)


def test_a_free_thread_does_not_go_to_the_same_tenant_again_and_again() -> None:
    async def run(held: Held) -> None:
        held.may_end.set()
        # One thread: several would begin in any order what they are given together.
        turns = FairThreads("test", threads=1, each=1)
        tasks = [asyncio.create_task(turns.run(name[0], held.work, name)) for name in NAMES]
        assert await asyncio.gather(*tasks) == NAMES
        assert held.begun[0] == "a0", "it had no turn to wait for"
        assert set(held.begun[1:4]) == {"a1", "b0", "c0"}
        assert set(held.begun[4:6]) == {"a2", "b1"}

    played(run)


def test_a_caller_that_gives_up_waiting_takes_no_turn() -> None:
    async def run(held: Held) -> None:
        turns = FairThreads("test", threads=1, each=1)
        first = asyncio.create_task(turns.run("a", held.work, "first"))
        await until_async(lambda: held.begun)
        waiting = [asyncio.create_task(turns.run("b", held.work, "gone")) for _ in range(3)]
        last = asyncio.create_task(turns.run("b", held.work, "last"))
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        held.may_end.set()
        assert await asyncio.gather(first, last) == ["first", "last"]
        assert held.begun == ["first", "last"]

    played(run)


def test_a_caller_that_gives_up_when_a_thread_becomes_free_costs_nobody_a_thread() -> None:
    async def run(held: Held) -> None:
        turns = FairThreads("test", threads=1, each=1)
        first = asyncio.create_task(turns.run("a", held.work, "first"))
        await until_async(lambda: held.begun)
        gone = [asyncio.create_task(turns.run(owner, held.work, "gone")) for owner in "bbc"]
        last = asyncio.create_task(turns.run("d", held.work, "last"))
        await asyncio.sleep(0)
        held.may_end.set()
        # The thread has done its work and its news is on the way to the loop, which the cancellations reach first.
        turns._pool.submit(bool).result()
        for one in gone:
            one.cancel()
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(first, last) == ["first", "last"]
        assert held.begun == ["first", "last"]
        assert turns.is_idle

    played(run)


def test_work_whose_request_was_cancelled_keeps_its_thread_until_it_ends() -> None:
    async def run(held: Held) -> None:
        turns = FairThreads("test", threads=1, each=1)
        cancelled = asyncio.create_task(turns.run("a", held.work, "cancelled"))
        await until_async(lambda: held.begun)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        following = asyncio.create_task(turns.run("b", held.work, "following"))
        await asyncio.sleep(0.05)
        assert held.begun == ["cancelled"]
        assert not turns.is_idle
        held.may_end.set()
        assert await following == "following"

    played(run)


def test_an_exception_of_the_work_is_raised_and_the_thread_is_free_again() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def run(_held: Held) -> None:
        turns = FairThreads("test", threads=1, each=1)
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await turns.run("a", fail)

    played(run)


def test_places_are_shared_and_whoever_has_none_is_let_in() -> None:
    """Four clients that take all they can get leave places for a fifth and for every other."""
    places = InFlightLimits(each=4, together=16)
    taken = dict.fromkeys("abcd", 0)
    with ExitStack() as held:
        for client in "abcd" * 5:
            with suppress(InternalError, RateLimitExceeded):
                held.enter_context(places.slot(client))
                taken[client] += 1
        assert min(taken.values()) >= 3
        assert sum(taken.values()) < 16
        for client in "efghijklmn":
            held.enter_context(places.slot(client))
        with pytest.raises(InternalError) as refused, places.slot("n"):
            pass
        assert (refused.value.status, refused.value.retry_after) == (503, 1)


MERGES = 40


def test_forty_merges_take_no_thread_of_others(service: Service) -> None:
    """The writer's lock is held, so no merge ends; if merges took all threads, nobody else would be answered."""
    sources = [service.dataset(), service.dataset()]
    service.dataset("bob")
    body = {"dataset_ids": sources, "name": "m"}

    async def merge() -> list[httpx.Response]:
        asks = [service.ask("POST", "/v1/datasets/merge", json=body) for _ in range(MERGES)]
        return await asyncio.gather(*asks)

    with service.database.write():
        merging = asyncio.run_coroutine_threadsafe(merge(), service.loop)
        assert service.call("GET", "/healthz", None).status_code == 200
        assert service.call("GET", "/v1/datasets", "bob").status_code == 200
        assert not merging.done()
    answers = merging.result(PATIENCE_S)
    assert [one.status_code for one in answers if one.status_code != 429] == [201] * 4
    for one in answers:
        if one.status_code == 429:
            assert (one.headers["retry-after"], one.headers["x-should-retry"]) == ("1", "true")


def test_a_hundred_waiting_requests_of_a_tenant_take_no_thread_of_others(service: Service) -> None:
    body = {"model_name": "tuneship-tiny"}

    async def create() -> list[httpx.Response]:
        asks = [
            service.ask("POST", "/v1/deployments", json=body | {"deployment_name": f"d{number}"})
            for number in range(100)
        ]
        return await asyncio.gather(*asks)

    with service.database.write():
        creating = asyncio.run_coroutine_threadsafe(create(), service.loop)
        assert service.call("GET", "/healthz", None).status_code == 200
        assert service.call("GET", "/v1/datasets", "bob").status_code == 200
        assert not creating.done()
    # 429 by the quota
    assert {one.status_code for one in creating.result(PATIENCE_S)} == {201, 429}


def test_a_thread_has_room_for_a_grammar_where_the_host_gives_it_little() -> None:
    program = """
import asyncio
from tuneship.contract.generation import ResponseFormat
from tuneship.host.thread_pools import use_large_stacks
from tuneship.service.context.fair_threads import FairThreads
from tuneship.service.generation.answer_grammar import answer_grammar

use_large_stacks()
links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(490)} | {"d490": {"type": "string"}}
schema = {"$defs": links, "$ref": "#/$defs/d0"}
form = ResponseFormat.model_validate({"type": "json_schema", "schema": schema})

async def compile_one():
    threads = FairThreads("text", 4, 1)
    await threads.run("a", answer_grammar, form)
    threads.dismiss()

asyncio.run(compile_one())
"""
    # Without it, the process ends with SIGSEGV.
    subprocess.run(
        ["/bin/sh", "-c", 'ulimit -s 512; exec "$@"', "sh", sys.executable, "-c", program],
        check=True,
        cwd=Path(__file__).parents[3],
        timeout=PATIENCE_S,
    )
