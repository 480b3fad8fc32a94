"""A forecast says how the gates will decide: it is drawn from them, and is the same every time."""

import math
from functools import cache

import pytest

from tests.unit.gates.drawn import (
    KINDS,
    PUBLISHED,
    Behaviour,
    Kind,
    Minute,
    roll_out,
    runs_of,
    watched,
)
from tests.unit.gates.rollouts import plan_with
from tuneship.gates.forecast import Forecast, Today, choose_steps, forecast
from tuneship.gates.readings import choose_gates


@cache
def forecast_for(requests_per_minute: float, errors: float = 0.0, **fields: object) -> Forecast:
    plan = plan_with(**fields)
    return forecast(plan, Today(requests_per_minute, errors), choose_gates(plan, PUBLISHED))


def test_at_five_requests_a_second_an_equal_candidate_takes_the_shortest_time() -> None:
    found = forecast_for(300.0, 0.005)
    assert found.promote_minutes == pytest.approx(20.0, abs=4)
    assert found.promote_minutes_most is not None
    assert found.more_errors_minutes is not None
    assert found.more_errors_minutes < 20
    assert found.more_errors_minutes_most is not None
    assert (found.drawn, found.promoted, found.undecided) == (20, 20, 0)


def test_the_forecast_agrees_with_requests_drawn_by_another_hand() -> None:
    found = forecast_for(300.0, 0.005)
    looks = sorted(run.looks for run in runs_of(KINDS["5 % errors"], range(3)))
    assert found.more_errors_minutes is not None
    assert looks[0] / 2 <= found.more_errors_minutes <= 2 * looks[-1]


def test_the_same_traffic_has_the_same_forecast() -> None:
    assert forecast_for.__wrapped__(300.0, 0.005) == forecast_for(300.0, 0.005)


def test_a_plan_that_can_prove_nothing_is_reported_with_its_reason() -> None:
    few = forecast_for(0.5)
    assert few.promote_minutes is None
    assert [one.what for one in few.unprovable] == ["insufficient_data"]
    assert "5 % of the requests that come within 1.5 h are about 2.2" in few.unprovable[0].why
    sick = forecast_for(300.0, 0.08)
    assert sick.promote_minutes is None
    assert "the baseline fails more often than `slo_max` allows" in sick.unprovable[0].why


def test_a_doubling_within_the_margin_is_not_promised_to_be_found() -> None:
    found = forecast_for(300.0, 0.004)
    assert found.doubling_minutes is None
    assert "doubling" in [one.what for one in found.unprovable]
    assert forecast_for(1200.0, 0.015).doubling_minutes is not None


@pytest.mark.parametrize(
    ("requests", "steps"),
    [
        (300.0, [5, 25, 50, 75, 100]),
        (40.0, [15, 25, 50, 75, 100]),
        (24.0, [25, 50, 75, 100]),
        (10.0, [50, 75, 100]),
        (0.0, [50, 75, 100]),
    ],
)
def test_little_traffic_begins_with_a_larger_step(requests: float, steps: list[int]) -> None:
    assert choose_steps(requests, plan_with()) == steps
    assert plan_with(steps=steps).steps == steps


# Requests a minute and the share of errors, where a promotion takes longer than the plan's least looks.
SLOWER_THAN_THE_MINIMUM = [(10.0, 0.005), (20.0, 0.0), (30.0, 0.01), (60.0, 0.005), (300.0, 0.02)]


def is_within_nine_of_ten(requests: float, errors: float, seed: int) -> bool | None:
    """Whether a rollout is promoted within the time that the hour before had forecast for nine of ten.

    None where nothing was forecast for nine of ten.
    """
    minute = Minute(requests, *[Behaviour(errors=errors)] * 2)
    kind = Kind("", lambda _: lambda *_: minute)
    hour = [bucket.baseline for bucket in watched(kind, seed)[0]]
    counted = sum(arm.requests for arm in hour)
    gone = sum((arm.cancelled or 0) + (arm.refused or 0) for arm in hour)
    today = Today(
        (counted + gone) / len(hour),
        sum(arm.errors for arm in hour) / counted,
        0.002,
        0.005,
        0.003,
    )
    steps = choose_steps(today.requests_per_minute, plan_with())
    plan = plan_with(steps=steps, bake_weight=80, wait_for_traffic="12h")
    most = forecast(plan, today, choose_gates(plan, PUBLISHED)).promote_minutes_most
    run = roll_out(kind, seed, steps=steps)
    return None if most is None else run.is_promoted and run.looks <= most


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("requests", "errors"), SLOWER_THAN_THE_MINIMUM)
def test_nine_of_ten_rollouts_end_within_the_time_of_nine_of_ten(
    requests: float, errors: float
) -> None:
    runs = [is_within_nine_of_ten(requests, errors, seed) for seed in range(5000, 5060)]
    forecast_runs = [one for one in runs if one is not None]
    number = len(forecast_runs)
    # At 300 requests a minute, few rollouts are drawn: one that is not promoted leaves nothing to say of nine of ten.
    assert number >= 25
    # Less two standard deviations of so many runs.
    assert sum(forecast_runs) >= number * (0.85 - 2 * math.sqrt(0.85 * 0.15 / number))
