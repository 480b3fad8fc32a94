"""The scaling rules choose the number of replicas: a table of moments, and a simulated day."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.service.deployments.scaling import (
    COOLDOWN,
    ReplicaBounds,
    ScalingDecision,
    ScalingSettings,
    Supply,
    next_decision,
)
from tuneship.service.telemetry.in_flight import Demand

START = datetime(2026, 1, 1, tzinfo=UTC)
PATIENCE = ScalingSettings(queue=timedelta(seconds=1), idle=timedelta(seconds=300))
ROWS = 32


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def after(
    before: ScalingDecision, bounds: ReplicaBounds, demand: Demand, now: datetime, **supply: Any
) -> tuple[int, str]:
    found = next_decision(
        before,
        bounds,
        Supply(**{"replicas": before.replicas, "queued": 0, "rows": ROWS} | supply),
        demand,
        PATIENCE,
        now,
    )
    return found.replicas, found.why


QUEUE = Demand(in_flight=50, waiting=18, waited=seconds(1.5))


@pytest.mark.parametrize(
    ("replicas", "bounds", "demand", "queued", "wanted"),
    [
        pytest.param(1, (1, 4), QUEUE, 18, 2, id="a queue brings one more"),
        pytest.param(4, (1, 9), QUEUE, 18, 6, id="with many, half as many again"),
        pytest.param(4, (1, 5), QUEUE, 18, 5, id="never more than the most"),
        pytest.param(4, (1, 4), QUEUE, 18, 4, id="the most stays"),
        pytest.param(1, (1, 4), QUEUE, 0, 1, id="a long prompt is no queue"),
        pytest.param(
            1, (1, 4), Demand(50, 18, seconds(0.9)), 18, 1, id="a short wait is no reason"
        ),
        pytest.param(0, (0, 4), Demand(in_flight=1), 0, 1, id="a request wakes"),
        pytest.param(0, (0, 4), Demand(), 0, 0, id="nothing wakes without a request"),
        pytest.param(5, (1, 3), Demand(), 0, 3, id="a lower most at once"),
        pytest.param(1, (2, 3), Demand(), 0, 2, id="a higher least at once"),
        pytest.param(0, (1, 1), Demand(), 0, 1, id="a least of one wakes"),
    ],
)
def test_a_moment(
    replicas: int, bounds: tuple[int, int], demand: Demand, queued: int, wanted: int
) -> None:
    before = ScalingDecision(replicas, START, START)
    found, why = after(before, ReplicaBounds(*bounds), demand, START + seconds(10), queued=queued)
    assert found == wanted
    assert bool(why) == (wanted != replicas)


def test_nothing_is_added_while_what_was_added_is_being_started_or_has_just_come() -> None:
    before, bounds = ScalingDecision(2, START, START), ReplicaBounds(1, 4)
    soon, later = START + COOLDOWN - seconds(0.1), START + COOLDOWN
    assert after(before, bounds, QUEUE, soon, queued=9)[0] == 2
    assert after(before, bounds, QUEUE, later, queued=9, replicas=1)[0] == 2
    assert after(before, bounds, QUEUE, later, queued=9)[0] == 3


def through(
    pace: ScalingDecision,
    bounds: ReplicaBounds,
    demands: list[Demand],
    every: timedelta,
    now: datetime = START,
) -> list[int]:
    """The number of replicas after each of these demands."""
    numbers: list[int] = []
    for demand in demands:
        now += every
        queued = max(0, demand.in_flight - ROWS * max(1, pace.replicas))
        pace = next_decision(
            pace, bounds, Supply(pace.replicas, queued, ROWS), demand, PATIENCE, now
        )
        numbers.append(pace.replicas)
    return numbers


def test_replicas_leave_one_by_one_when_fewer_would_have_done_for_the_whole_time() -> None:
    quiet = through(
        ScalingDecision(3, START, START), ReplicaBounds(0, 4), [Demand()] * 16, seconds(60)
    )
    assert quiet == [3] * 4 + [2] * 5 + [1] * 5 + [0] * 2


def test_a_single_request_keeps_the_last_replica_and_a_full_batch_the_others() -> None:
    now_and_then = [Demand(), Demand(), Demand(), Demand(in_flight=1)] * 5
    assert (
        through(ScalingDecision(1, START, START), ReplicaBounds(0, 4), now_and_then, seconds(60))
        == [1] * 20
    )
    busy = [Demand(in_flight=ROWS // 2 + 1)] * 20
    assert (
        through(ScalingDecision(2, START, START), ReplicaBounds(1, 4), busy, seconds(60))
        == [2] * 20
    )
    half = [Demand(in_flight=ROWS // 2)] * 20
    assert (
        through(ScalingDecision(2, START, START), ReplicaBounds(1, 4), half, seconds(60))[-1] == 1
    )


def test_a_day_with_a_rush_ends_as_it_began() -> None:
    rush = [Demand(in_flight=200, waiting=50, waited=seconds(2))] * 60
    numbers = through(
        ScalingDecision(0, START, START),
        ReplicaBounds(0, 4),
        [*rush, *[Demand()] * 3600],
        seconds(1),
    )
    assert max(numbers) == 4
    assert numbers[-1] == 0
    downwards = numbers[numbers.index(4) :]
    assert downwards == sorted(downwards, reverse=True)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.floats(0, 200)),
        min_size=1,
        max_size=60,
    ),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 9),
)
def test_the_number_never_leaves_its_bounds(
    seen: list[tuple[int, int, float]], least: int, more: int, first: int
) -> None:
    bounds = ReplicaBounds(least, max(1, least + more))
    demands = [Demand(in_flight, waiting, seconds(waited)) for in_flight, waiting, waited in seen]
    numbers = through(ScalingDecision(first, START, START), bounds, demands, seconds(7))
    assert all(bounds.least <= number <= bounds.most for number in numbers)
    for demand, number in zip(demands, numbers, strict=True):
        assert number > 0 or not demand.in_flight
