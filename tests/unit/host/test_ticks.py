"""A step is repeated soon while it finds work, and at once after a change, but not otherwise."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from tests.support.waiting import PATIENCE_S
from tuneship.host.ticks import Ticks

# Longer than any test waits.
NEVER_S = 10 * PATIENCE_S


def repeat(
    ticks: Ticks, steps: Sequence[Callable[[], Awaitable[bool]]], until: asyncio.Event
) -> None:
    """Repeat the steps beside each other until the event is set."""

    async def run() -> None:
        loops = [asyncio.create_task(ticks.repeat(step)) for step in steps]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await until.wait()
        finally:
            for loop in loops:
                loop.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*loops)

    asyncio.run(run())


def test_a_step_that_finds_work_is_repeated() -> None:
    ticks, done, calls = Ticks(0.0, NEVER_S), asyncio.Event(), [True, True, False]

    async def step() -> bool:
        has_work = calls.pop(0)
        if not calls:
            done.set()
        return has_work

    repeat(ticks, [step], done)
    assert not calls


def test_a_change_wakes_every_idle_loop() -> None:
    ticks, done, calls = Ticks(NEVER_S, NEVER_S), asyncio.Event(), list[str]()

    def named(name: str) -> Callable[[], Awaitable[bool]]:
        async def step() -> bool:
            calls.append(name)
            if len(calls) == 2:
                ticks.wake()
            if len(calls) == 4:
                done.set()
            return False

        return step

    repeat(ticks, [named("a"), named("b")], done)
    assert sorted(calls) == ["a", "a", "b", "b"]


def test_a_change_in_the_middle_of_a_step_is_not_lost() -> None:
    ticks, done, calls = Ticks(NEVER_S, NEVER_S), asyncio.Event(), list[int]()

    async def step() -> bool:
        calls.append(1)
        if len(calls) == 1:
            ticks.wake()  # after what the step has read
            await asyncio.sleep(0)
        else:
            done.set()
        return False

    repeat(ticks, [step], done)
    assert len(calls) == 2


def test_a_step_that_fails_is_tried_again() -> None:
    ticks, done, calls = Ticks(NEVER_S, NEVER_S), asyncio.Event(), list[int]()

    async def step() -> bool:
        calls.append(1)
        if len(calls) == 1:
            raise OSError
        done.set()
        return False

    repeat(ticks, [step], done)
    assert len(calls) == 2
