"""The processes of one base model are started, probed and replaced, and end when there are too many of them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.service.engines import PlayedEngines
from tests.support.waiting import until_async
from tuneship.replicas.local_replicas import LocalReplicas
from tuneship.replicas.replica_group import HUNG_PROBES
from tuneship.replicas.replica_link import Adapter, NoReplica
from tuneship.serving.replica_client import GenerateRequest, ReplicaLost, ReplicaRefused

REQUEST = GenerateRequest(
    tokens=(1,), max_tokens=2, adapter=None, temperature=0.0, top_p=1.0, seed=None, stop_tokens=()
)


def messages(group: LocalReplicas) -> list[str]:
    return [one.message.split(":")[0] for one in group.take_events()]


async def ended(engines: PlayedEngines, number: int) -> None:
    await until_async(lambda: engines.replicas[number].code is not None)


async def noticed(group: LocalReplicas, number: int) -> None:
    """Wait until this many replicas live, because the end of a process is noticed a moment later."""
    await until_async(lambda: len(group.live) == number)


async def started(group: LocalReplicas, number: int) -> None:
    group.resize(number, {})
    await group.ready(None, number)
    assert len(group.live) == number


async def text(group: LocalReplicas, adapter: Adapter | None = None) -> list[int]:
    request = replace(REQUEST, adapter=None if adapter is None else adapter.name)
    async with await group.generate(adapter, request) as generation:
        return [token async for chunk in generation for token in chunk]


def test_as_many_as_wanted_are_started_and_take_turns(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await started(group, 3)
        assert messages(group) == ["replica started"] * 3
        engines.may_answer.clear()
        generations = [await group.generate(None, REQUEST) for _ in range(3)]
        assert [one.link.in_flight for one in group.live] == [1, 1, 1]
        engines.may_answer.set()
        assert [[t async for chunk in one for t in chunk] for one in generations] == [[5, 6]] * 3
        await group.close()

    asyncio.run(run())


def test_one_that_is_too_many_finishes_what_it_has_and_takes_no_more(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await started(group, 2)
        engines.may_answer.clear()
        earlier = [asyncio.create_task(text(group)) for _ in range(2)]
        await asyncio.sleep(0.05)
        group.resize(1, {})
        assert len(group.live) == 1
        assert [one.code for one in engines.replicas] == [None, None]
        later = [asyncio.create_task(text(group)) for _ in range(2)]
        # Whichever was ready first stays.
        await until_async(lambda: sorted(len(one.running) for one in engines.replicas) == [1, 3])
        engines.may_answer.set()
        assert await asyncio.gather(*earlier, *later) == [[5, 6]] * 4
        reported: list[str] = []

        def is_reported() -> bool:
            reported.extend(messages(group))
            return "replica ended" in reported

        await until_async(is_reported)
        assert sorted(one.code is None for one in engines.replicas) == [False, True]
        assert reported == ["replica started", "replica started", "replica ended"]
        await group.close()

    asyncio.run(run())


def test_one_that_died_is_reported_and_replaced(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await group.ready(None)
        engines.replicas[0].kill()
        await noticed(group, 0)
        assert await text(group) == [5, 6]
        assert messages(group) == ["replica started", "replica lost", "replica started"]
        await group.close()

    asyncio.run(run())


def test_requests_go_on_while_more_are_being_started(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await group.ready(None)
        engines.fault = "no memory"
        group.resize(2, {})
        await group.ready(None, 2)
        assert len(group.live) == 1
        assert await text(group) == [5, 6]
        assert "replica not started" in messages(group)
        await group.close()

    asyncio.run(run())


def test_one_that_hangs_is_no_longer_answering_and_is_ended_after_some_probes(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await group.ready(None)
        (replica,) = group.live
        await group.probe(60)
        assert replica.is_answering
        engines.replicas[0].hangs = True
        await group.probe(0.02)
        assert replica.is_live
        assert not replica.is_answering
        engines.replicas[0].hangs = False
        await group.probe(60)
        assert replica.is_answering
        engines.replicas[0].hangs = True
        for _ in range(HUNG_PROBES):
            await group.probe(0.02)
        assert engines.replicas[0].code is not None
        await noticed(group, 0)
        assert await text(group) == [5, 6]
        assert "replica does not answer" in messages(group)
        await group.close()

    asyncio.run(run())


def test_closing_ends_all_of_them_those_that_leave_too(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await started(group, 2)
        engines.may_answer.clear()
        asking = [asyncio.create_task(text(group)) for _ in range(2)]
        await asyncio.sleep(0.05)
        group.resize(1, {})
        await group.close()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(one) for one in results} == {ReplicaLost}
        for number in range(2):
            await ended(engines, number)

    asyncio.run(run())


def adapter(name: str) -> Adapter:
    return Adapter(name, Path(name))


def loaded(engines: PlayedEngines) -> list[set[str]]:
    return [one.adapters for one in engines.replicas]


def test_a_model_is_loaded_and_asked_on_as_many_as_it_is_to_be_even_when_others_go(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await started(group, 4)
        names = [f"m{number}" for number in range(8)]
        group.resize(4, dict.fromkeys(names, 1) | {"wide": 3})
        for name in [*names, "wide"]:
            await group.ready(adapter(name))
        assert [group.answering(name) for name in (*names, "wide", "unknown", None)] == (
            [1] * 8 + [3, 0, 4]
        )
        assert sum(map(len, loaded(engines))) == 11
        assert len([one for one in loaded(engines) if one - {"wide"}]) > 1
        before = [set(one) for one in loaded(engines)]
        engines.replicas[0].kill()
        await noticed(group, 3)
        for name in [*names, "wide"]:
            assert await text(group, adapter(name)) == [5, 6]
            await group.ready(adapter(name))
        after = loaded(engines)
        moved = before[0]
        assert all(new - old <= moved for old, new in zip(before[1:], after[1:], strict=False))
        await group.close()

    asyncio.run(run())


def test_a_new_one_has_what_it_will_be_asked_for_before_it_is_asked(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await group.ready(adapter("a"))
        await started(group, 2)
        assert loaded(engines) == [{"a"}, {"a"}]
        assert group.answering("a") == 2
        await group.close()

    asyncio.run(run())


def test_the_least_busy_is_asked(group: LocalReplicas, engines: PlayedEngines) -> None:
    async def run() -> None:
        await started(group, 2)
        engines.may_answer.clear()
        asking = [asyncio.create_task(text(group)) for _ in range(2)]
        await asyncio.sleep(0.05)
        first, second = group.live
        generations = [first.link.generate(REQUEST) for _ in range(5)]
        more = [asyncio.create_task(text(group)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert (first.link.in_flight, second.link.in_flight) == (6, 6)
        for one in generations:
            await one.aclose()
        await group.close()
        await asyncio.gather(*asking, *more, return_exceptions=True)

    asyncio.run(run())


def test_an_adapter_in_use_stays_when_it_is_forgotten(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await group.ready(adapter("a"))
        engines.may_answer.clear()
        asking = asyncio.create_task(text(group, adapter("a")))
        await asyncio.sleep(0.05)
        await group.unload("a")
        assert loaded(engines) == [{"a"}]
        engines.may_answer.set()
        assert await asking == [5, 6]
        await group.unload("a")
        assert loaded(engines) == [set()]
        assert await text(group, adapter("a")) == [5, 6]
        assert loaded(engines) == [{"a"}]
        await group.close()

    asyncio.run(run())


def test_one_that_computes_nothing_finite_is_not_asked(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        engines.cannot_run = "the base"
        with pytest.raises(NoReplica, match="not finite"):
            await group.ready(None)
        assert group.live == []
        await ended(engines, 0)
        engines.cannot_run = "a"
        with pytest.raises(ReplicaRefused, match="not finite"):
            await group.ready(adapter("a"))
        assert loaded(engines)[-1] == set()
        assert await text(group, adapter("b")) == [5, 6]
        await group.close()

    asyncio.run(run())


def test_after_a_failed_start_requests_are_refused_at_once_for_a_while(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        engines.fault = "no memory"
        failures = await asyncio.gather(*(text(group) for _ in range(8)), return_exceptions=True)
        assert {type(one) for one in failures} == {NoReplica}
        assert len(engines.replicas) == 1
        # After this the pause is longer than anything may stand still here.
        for _ in range(5):
            with pytest.raises(NoReplica, match="no memory"):
                await group.ready(None)
        assert len(engines.replicas) == 6
        with pytest.raises(NoReplica, match="no memory"):
            await text(group)
        assert len(engines.replicas) == 6
        engines.fault = ""
        await group.ready(None)
        assert await text(group) == [5, 6]
        await group.close()

    asyncio.run(run())


def test_closing_leaves_nothing_to_run(group: LocalReplicas, engines: PlayedEngines) -> None:
    async def run() -> None:
        await started(group, 2)
        engines.may_answer.clear()
        asking = asyncio.create_task(text(group))
        await asyncio.sleep(0.05)
        group.resize(0, {})
        engines.may_start.clear()
        starting = asyncio.create_task(group.ready(None))
        await asyncio.sleep(0.05)
        assert len(engines.replicas) == 3
        await group.close()
        engines.may_start.set()
        results = await asyncio.gather(asking, starting, return_exceptions=True)
        assert [type(one) for one in results] == [ReplicaLost, NoReplica]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        for number in range(3):
            await ended(engines, number)

    asyncio.run(run())


def test_waiting_for_more_replicas_ends_when_fewer_are_wanted(
    group: LocalReplicas, engines: PlayedEngines
) -> None:
    async def run() -> None:
        await started(group, 1)
        engines.may_start.clear()
        waiting = asyncio.create_task(group.ready(None, 3))
        await asyncio.sleep(0.05)
        assert len(engines.replicas) == 3
        group.resize(1, {})
        engines.may_start.set()
        await waiting

        def is_alone() -> bool:
            # Every round of the supervisor does this.
            group.resize(1, {})
            return [one.code for one in engines.replicas].count(None) == 1

        await until_async(is_alone)
        assert len(engines.replicas) == 3
        await group.close()

    asyncio.run(run())
