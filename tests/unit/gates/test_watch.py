"""The watch compares what serves now with its first day: few false reports, and early reports of real changes."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from tests.unit.gates.drawn.worlds import EDGES, Behaviour, Minute, Service
from tests.unit.gates.rollouts import START
from tuneship.gates.metrics.series import Bucket, Unusable
from tuneship.gates.watch import (
    ALPHA,
    DAY,
    LIMITS,
    QUARTER,
    Stretch,
    Weighed,
    asked_from,
    first_traffic,
    rounded_up,
    stretches,
    weigh,
)

HEALTHY = Behaviour()
# Function of the number of the quarter hour since the deployment began.
Days = Callable[[int], Minute]


def always(behaviour: Behaviour, requests: float = 450.0) -> Days:
    return lambda _: Minute(requests, candidate=behaviour)


def later(behaviour: Behaviour, after: int, requests: float = 450.0) -> Days:
    return lambda quarter: Minute(requests, candidate=behaviour if quarter >= after else HEALTHY)


def drawn(days: Days, quarters: int, seed: int = 0) -> list[Bucket]:
    service = Service(np.random.default_rng(seed), lambda at, _: days(at), seconds=900)
    return [service.bucket(number, 100) for number in range(quarters)]


def answer(buckets: Sequence[Bucket]) -> dict[str, Any]:
    """Return these quarter hours of the candidate as the service answers them."""
    rows = [bucket.candidate for bucket in buckets]
    stamps = {"timestamps": [(b.end - QUARTER).isoformat() for b in buckets]}
    return {
        "end_time": (buckets[-1].end if buckets else START).isoformat(),
        "interval": "15m",
        "metrics": {
            "throughput": stamps | {"requests_per_second": [r.requests / 900 for r in rows]},
            "error_rate": stamps
            | {
                "request_count": [r.requests for r in rows],
                "error_count": [r.errors for r in rows],
                "cancelled_count": [r.cancelled for r in rows],
                "refused_count": [r.refused for r in rows],
                "error_callers": [r.error_callers for r in rows],
            },
            "latency": stamps
            | {
                "histogram": {
                    "le": [None if math.isinf(edge) else edge for edge in EDGES],
                    "counts": [list(r.histogram or [0] * len(EDGES)) for r in rows],
                }
            },
            "token_usage": stamps
            | {
                "output": [r.output_tokens for r in rows],
                "empty_count": [r.empty for r in rows],
            },
        },
    }


def look_after(buckets: Sequence[Bucket]) -> Weighed:
    """Take a look at the end of these quarter hours."""
    now = START + len(buckets) * QUARTER
    since = (asked_from(START, now) - START) // QUARTER
    return weigh(answer(buckets[:96]), answer(buckets[since:]), START, now)


def first_reports(buckets: Sequence[Bucket], looks: Iterable[int]) -> dict[str, int]:
    """Return the first look that reported each finding. A look is named by the quarter hours before it."""
    first_seen: dict[str, int] = {}
    for quarter in looks:
        seen = look_after(buckets[:quarter])
        assert not seen.unusable
        for gate in {one.gate for one in seen.readings if one.is_worse}:
            first_seen.setdefault(gate, quarter)
    return first_seen


def test_the_levels_of_all_stretches_sum_to_alpha() -> None:
    numbers = range(1, 3000)
    spent = sum(len(LIMITS) * math.exp(-Stretch(n, 0, 1).log_limit) for n in numbers)
    assert 0.999 * ALPHA < spent < ALPHA


def test_a_day_is_compared_with_the_first_and_its_hours_with_those_before() -> None:
    def hours(days: float) -> list[tuple[float, float]]:
        return [(s.start / 4, s.end / 4) for s in stretches(START, START + days * DAY)]

    assert hours(1 / 24) == []
    assert hours(2.5 / 24) == [(1, 2), (2, 4)]
    assert hours(1.0) == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 24)]
    assert hours(2.0) == [(24, 48)]
    assert hours(9.5) == [(8 * 24, 9 * 24), (9 * 24, 10 * 24)]
    assert asked_from(START, START + 9.5 * DAY) == START + 8 * DAY
    assert asked_from(START, START + DAY) == START + timedelta(hours=1)
    assert asked_from(START, START) == START


def test_fine_for_90_minutes_then_errors_and_twice_as_slow_is_found() -> None:
    buckets = drawn(later(Behaviour(errors=0.1, time=2.0), 6, 4500.0), 12)
    assert first_reports(buckets, range(1, 13)) == {"error": 7, "slow": 7}


def test_at_a_twentieth_of_the_traffic_its_errors_are_found_two_hours_later() -> None:
    buckets = drawn(later(Behaviour(errors=0.1, time=2.0), 6, 225.0), 14)
    assert first_reports(buckets, range(6, 15)).keys() == {"error"}


@pytest.mark.parametrize(
    ("gate", "behaviour"),
    [
        ("error", Behaviour(errors=0.08)),
        ("slow", Behaviour(time=2.0)),
        ("very_slow", Behaviour(slow_share=0.08, slow_factor=20.0)),
        ("empty", Behaviour(blank=0.08)),
        ("abandoned", Behaviour(cancelled=0.15)),
        ("refused", Behaviour(refused=0.15)),
    ],
)
def test_a_deployment_that_turns_bad_after_days_is_found_within_two_hours(
    gate: str, behaviour: Behaviour
) -> None:
    turned = 3 * 96 + 40
    buckets = drawn(later(behaviour, turned), turned + 8)
    assert first_reports(buckets, [turned]) == {}
    assert gate in first_reports(buckets, [turned + 8])


def test_a_bad_end_of_a_day_is_found_although_the_next_day_has_begun() -> None:
    buckets = drawn(bad_at_the_end_of_the_fifth_day, 5 * 96 + 2)
    assert first_reports(buckets, [5 * 96 + 2]).keys() == {"error"}


def bad_at_the_end_of_the_fifth_day(quarter: int) -> Minute:
    is_bad = 5 * 96 - 4 <= quarter < 5 * 96
    return Minute(450.0, candidate=Behaviour(errors=0.1) if is_bad else HEALTHY)


def working_days(quarter: int) -> Minute:
    """Every day has the same ramp: traffic x4, time x1.7. On two of seven days there is a quarter less."""
    hour, day = quarter % 96 / 4, quarter // 96
    busy = math.exp(-(((hour - 14.0) / 4.0) ** 2)) * (0.75 if day % 7 >= 5 else 1.0)
    return Minute(150.0 * (1 + 3 * busy), candidate=Behaviour(time=1.0 + 0.7 * busy, tail=0.002))


def at_the_margin(quarter: int) -> Minute:
    """After the first day as many errors and blank answers come as are just allowed, which must not be reported."""
    return later(Behaviour(errors=0.02, blank=0.02), 96)(quarter)


KINDS: dict[str, Days] = {"working days": working_days, "at the margin": at_the_margin}


def false_alarms(days: Days, deployments: int, length: int, every: int) -> int:
    looks = range(every, length * 96 + 1, every)
    drawn_each = (drawn(days, length * 96, seed) for seed in range(deployments))
    return sum(bool(first_reports(buckets, looks)) for buckets in drawn_each)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deployment_that_stays_as_it_was_is_not_reported(kind: str) -> None:
    assert false_alarms(KINDS[kind], deployments=2, length=2, every=96) == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_over_many_days_false_alarms_stay_below_alpha(kind: str) -> None:
    deployments = 60
    # By the binomial distribution more than this has a probability below 1 % where the chance is ALPHA.
    assert false_alarms(KINDS[kind], deployments, length=10, every=24) <= 7


def test_one_caller_who_repeats_a_failing_request_decides_in_no_single_quarter_hour() -> None:
    buckets = drawn(always(HEALTHY), 5)
    last = buckets[-1].candidate
    burst = replace(last, requests=last.answered + 200, errors=200, error_callers=1)
    assert first_reports([*buckets[:-1], replace(buckets[-1], candidate=burst)], [5]) == {}
    many = replace(burst, error_callers=200)
    assert first_reports([*buckets[:-1], replace(buckets[-1], candidate=many)], [5]) == {"error": 5}


def test_metrics_a_server_does_not_publish_are_not_weighed_and_the_rest_is() -> None:
    buckets = drawn(later(Behaviour(errors=0.1), 6), 8)
    bare = answer(buckets)
    for name in ("cancelled_count", "refused_count", "error_callers"):
        del bare["metrics"]["error_rate"][name]
    seen = weigh(bare, bare, START, START + 8 * QUARTER)
    assert {one.gate for one in seen.readings} == {"error", "slow", "very_slow", "empty"}
    assert {one.gate for one in seen.readings if one.is_worse} == {"error"}

    bare["metrics"]["latency"] = {"timestamps": []}
    seen = weigh(bare, bare, START, START + 8 * QUARTER)
    assert {one.gate for one in seen.readings} == {"error", "empty"}
    assert seen.unusable == dict.fromkeys(("slow", "very_slow"), "answers without their latency")


def test_wrong_metrics_are_distinguished_from_none() -> None:
    with pytest.raises(Unusable, match="no metrics"):
        weigh(None, None, START, START + DAY)
    with pytest.raises(Unusable, match="requested buckets of 900 s"):
        weigh({"interval": "1m", "end_time": START.isoformat()}, None, START, START + DAY)
    nothing = answer([])
    assert not any(one.is_worse for one in weigh(nothing, nothing, START, START + DAY).readings)


def test_a_deployment_begins_with_its_first_traffic() -> None:
    buckets = drawn(lambda at: Minute(450.0 if at >= 3 else 0.0), 6)
    assert first_traffic(answer(buckets)) == START + 3 * QUARTER
    assert first_traffic(answer(buckets[:3])) is None
    assert rounded_up(START) == START
    assert rounded_up(START + timedelta(seconds=1)) == START + QUARTER
