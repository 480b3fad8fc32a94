"""Harm to callers that is no error: they disconnect, are refused, or wait. Also who the callers of errors are."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.gates.rollouts import START, Rollout, Served, Steady, answer, in_flight, plan_with
from tuneship.gates import canary
from tuneship.gates.canary import replay
from tuneship.gates.gate_types import GateReading, LatencyLimits
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.metrics.series import Bucket, InFlightAges, RolloutSeries, Unusable
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Look, Mark, Phase, Verdict
from tuneship.gates.split_check import LOG_MISMATCH, Drawn, drawn_requests, log_e_missing
from tuneship.gates.statistics.evidence import LOG_FAST_TIER, Z_WARN


def counted(**candidate: Any) -> Callable[[int, int], tuple[Served, Served]]:
    """Serve 600 counted requests a bucket from a healthy baseline and a candidate with the given bad shares."""

    def make(_: int, weight: int) -> tuple[Served, Served]:
        n_c = 6 * weight
        bad = {name: round(share * n_c) for name, share in candidate.items()}
        lost = sum(bad.get(name, 0) for name in ("cancelled", "refused"))
        errors = bad.get("errors", 0)
        full = {"cancelled": 0, "refused": 0, "callers": errors} | bad
        return (
            Served(600 - n_c, output=40.0 * (600 - n_c), cancelled=0, refused=0, callers=0),
            Served(n_c - lost, output=40.0 * (n_c - lost), **full),
        )

    return make


def gate(look: Look, name: str) -> GateReading:
    return next(one for one in look.gates if one.name == name)


@pytest.mark.parametrize(
    ("lost", "name", "reason"),
    [
        ("cancelled", "abandoned", "abandoned_requests"),
        ("refused", "refused", "refused_requests"),
    ],
)
def test_requests_that_end_without_an_answer_roll_back(lost: str, name: str, reason: str) -> None:
    rollout = Rollout(plan_with(), counted(**{lost: 0.3}), counts_callers=True).begin()
    last = rollout.run()
    assert (last.verdict, last.reason, last.reasons) == (
        Verdict.ROLLBACK,
        reason,
        (f"harm:{name}",),
    )
    assert last.number <= 4
    reading = gate(last, name)
    assert (reading.candidate_requests, reading.baseline_bad) == (30 * last.number, 0)


def test_a_server_that_counts_all_requests_has_its_equal_candidate_promoted_as_soon() -> None:
    rollout = Rollout(plan_with(), counted(), counts_callers=True).begin()
    assert rollout.run().verdict is Verdict.BAKED
    promoted = next(look for look in rollout.record.looks if look.verdict is Verdict.PROMOTE)
    assert promoted.number == 20
    assert {one.state for one in promoted.gates} == {"proven", "disabled", "not_available"}


def test_gates_on_lost_requests_take_a_small_part_of_alpha() -> None:
    look = Rollout(plan_with(), counted(), counts_callers=True).begin().look()
    limits = {one.name: one.log_e_harm_limit for one in look.gates if one.log_e_harm_limit}
    assert limits["error"] == pytest.approx(math.log(4.5 / 0.05))
    assert limits["refused"] == pytest.approx(math.log(4.5 / 0.25 / 0.05))
    assert sum(math.exp(-(limit or 0.0)) for limit in limits.values()) == pytest.approx(0.05)


def test_counts_that_are_gone_make_the_look_a_missing_one() -> None:
    rollout = Rollout(plan_with(), Steady(), counts_callers=True).begin()
    assert rollout.look().missing == "the counts of cancelled requests are gone"


# Callers of errors.


def test_one_caller_s_repeats_in_one_bucket_are_one_failure_for_the_fast_tier() -> None:
    def burst(callers: int) -> Look:
        errors = {"errors": 12 / 30, "callers": callers / 30}
        rollout = Rollout(plan_with(), counted(**errors), counts_callers=True).begin()
        return [rollout.look() for _ in range(2)][-1]

    many, one = burst(12), burst(1)
    assert (many.verdict, many.reasons) == (Verdict.ROLLBACK, ("harm:error",))
    assert one.verdict is Verdict.HOLD
    readings = gate(many, "error"), gate(one, "error")
    assert readings[0].log_e_harm == readings[1].log_e_harm
    assert (readings[0].log_u_harm or 0.0) >= LOG_FAST_TIER > (readings[1].log_u_harm or 0.0)


@pytest.mark.parametrize(
    ("errors", "callers", "trips"), [(18, 18, True), (18, 1, False), (30, 1, True)]
)
def test_the_breaker_counts_callers_unless_nearly_everything_fails(
    errors: int, callers: int, trips: bool
) -> None:
    shares = {"errors": errors / 30, "callers": callers / 30}
    plan = plan_with(latency_gates=None, quality_gates=None, error_gate=None, crash=None)
    look = Rollout(plan, counted(**shares), counts_callers=True).begin().look()
    assert ("circuit_breaker" in look.reasons) is trips


# Requests in flight.


def hangs_from(look: int) -> Callable[..., tuple[Any, Any]]:
    """From this look on five of the candidate's requests are older than 16 s, and one of the baseline's is young."""

    def answers(now: int, baseline: dict[str, Any], candidate: dict[str, Any]) -> tuple[Any, Any]:
        if now >= look:
            baseline["in_flight"] = in_flight([1024.0, 16384.0], [0, 1, 1])
            candidate["in_flight"] = in_flight([1024.0, 16384.0], [0, 1, 6])
        return baseline, candidate

    return answers


def test_a_caller_who_waits_too_long_counts_as_slow_before_the_request_ends() -> None:
    rollout = Rollout(plan_with(), counted(), counts_callers=True, answers=hangs_from(3)).begin()
    # The first bucket sets the limits.
    _, first, second = rollout.look(), rollout.look(), rollout.look()
    assert (first.hanging_candidate, second.hanging_candidate) == ((), (2, 2, 1))
    assert second.hanging_baseline == ()
    for name in ("slow", "very_slow"):
        before, after = gate(first, name), gate(second, name)
        assert after.candidate_requests == 2 * before.candidate_requests + 4
        assert after.candidate_bad >= before.candidate_bad + 4
    assert gate(second, "error").candidate_bad == 0
    third = rollout.look()
    assert sum(third.hanging_candidate) == 5
    assert gate(third, "slow").candidate_requests <= 95, "the same request is not counted twice"


def test_replay_knows_who_hung_at_each_look_though_no_bucket_shows_it() -> None:
    rollout = Rollout(plan_with(), counted(), counts_callers=True, answers=hangs_from(3)).begin()
    for _ in range(6):
        rollout.look()
    assert rollout.record.looks[-1].hanging_candidate == (1, 1, 1, 1, 1)
    assert all(recorded == decided for recorded, decided in replay(rollout.record))


def test_only_what_is_certainly_older_counts() -> None:
    snapshot = InFlightAges((1000.0, 10_000.0, math.inf), (2, 5, 9))
    young, old = (1000.0, 10_000.0, 3), (10_000.0, math.inf, 4)
    assert snapshot.older_than(500.0) == snapshot.older_than(1000.0) == [young, old]
    assert snapshot.older_than(1001.0) == snapshot.older_than(10_000.0) == [old]
    assert snapshot.older_than(10_001.0) == []


# Reading the service's answer.


def read(change: Callable[[dict[str, Any]], None], **served: Any) -> RolloutSeries:
    one = answer({0: Served(10, 4, **served), 1: Served(5, 0, **served)}, end=2)
    change(one)
    return read_series(one, one, "1m")


def of_callers(bucket: Bucket) -> tuple[int | None, ...]:
    one = bucket.candidate
    return one.cancelled, one.refused, one.error_callers


def test_counts_of_callers_are_read_where_they_are_published() -> None:
    series = read(lambda _: None, cancelled=3, refused=2, callers=1)
    assert list(map(of_callers, series.buckets)) == [(3, 2, 1), (3, 2, 0)]
    bare = read(lambda _: None)
    assert list(map(of_callers, bare.buckets)) == [(None, None, None)] * 2


def test_a_bucket_without_a_row_had_none_and_a_null_is_not_known() -> None:
    def change(one: dict[str, Any]) -> None:
        one["metrics"]["error_rate"] = {
            name: values[:1] for name, values in one["metrics"]["error_rate"].items()
        }
        one["metrics"]["error_rate"]["refused_count"] = [None]
        one["metrics"]["throughput"]["requests_per_second"][1] = 0.0
        one["metrics"]["latency"] = None

    series = read(change, cancelled=3, refused=2, callers=1)
    assert of_callers(series.buckets[1]) == (0, 0, 0)
    assert series.buckets[0].candidate.refused is None


def test_a_server_without_ages_publishes_nothing_in_flight() -> None:
    series = read(lambda one: one.update(in_flight=None))
    assert series.in_flight == {"baseline": None, "candidate": None}


@pytest.mark.parametrize(
    "snapshot",
    [
        7,
        {"requests": 3},
        {"requests": 3, "ages_ms": None},
        {"requests": 1, "ages_ms": {"le": [1, None], "counts": [2, 1]}},
        {"requests": 2, "ages_ms": {"le": [1, None], "counts": [2]}},
        {"requests": 1, "ages_ms": {"le": [1, 2], "counts": [0, 1]}},
    ],
)
def test_ages_that_cannot_be_counted_are_unusable(snapshot: Any) -> None:
    with pytest.raises(Unusable):
        read(lambda one: one.update(in_flight=snapshot))


# The split of the traffic.


def test_requests_that_nobody_counted_hold_the_roll_out() -> None:
    def make(bucket: int, weight: int) -> tuple[Served, Served]:
        baseline, candidate = counted()(bucket, weight)
        return baseline, replace(candidate, requests=candidate.requests * 7 // 10)

    plan = plan_with(split_check=True, max_looks_per_step=15)
    rollout = Rollout(plan, make, counts_callers=True).begin()
    last = rollout.run()
    assert (last.verdict, last.reason) == (Verdict.ROLLBACK, "split_mismatch")
    assert 50 not in rollout.weights
    unchecked = Rollout(plan_with(), make, counts_callers=True).begin()
    assert unchecked.run().verdict is Verdict.BAKED


def test_the_split_is_checked_by_itself_only_where_the_pipeline_sends_the_requests() -> None:
    driver = {"prompts": "p.jsonl", "requests_per_second": 1.0}
    assert not plan_with().has_split_check
    assert plan_with(traffic=driver).has_split_check
    assert not plan_with(traffic=driver, split_check=False).has_split_check


@pytest.mark.parametrize(
    "limits", [None, LatencyLimits(1.0, 2.0, 3.0, 100, per_token=True)], ids=["none", "a token"]
)
def test_answers_in_flight_at_a_shift_are_not_missed_without_a_limit_of_whole_answers(
    limits: LatencyLimits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(bucket: int, weight: int) -> tuple[Served, Served]:
        baseline, candidate = counted()(bucket, weight)
        if bucket < 10:  # seconds
            candidate = replace(candidate, requests=candidate.requests * 4 // 10)
        return baseline, candidate

    plan = plan_with(split_check=True, interval="1s", min_looks_per_step=12)
    made = canary.make_view
    monkeypatch.setattr(
        canary, "make_view", lambda *given, **named: replace(made(*given, **named), limits=limits)
    )
    rollout = Rollout(plan, make, counts_callers=True).begin()
    assert not any("split_mismatch" in rollout.look().reasons for _ in range(12))


def test_a_step_s_first_bucket_and_slow_answers_say_nothing_about_its_split() -> None:
    rows = {i: Served(100, cancelled=0, refused=0) for i in range(8)}
    series = read_series(answer(rows, end=8), answer(rows, end=8), "1m")
    marks = {5: Mark(START, 0), 25: Mark(START + timedelta(minutes=4), 4)}
    drawn = drawn_requests(series.buckets, marks, timedelta(minutes=1))
    assert drawn == [Drawn(100, 100, 5)] * 3 + [Drawn(100, 100, 25)] * 3
    drawn = drawn_requests(series.buckets, marks, timedelta(minutes=3))
    assert drawn == [Drawn(100, 100, 5)] * 2 + [Drawn(100, 100, 25)] * 2


def test_a_missing_share_is_found_and_the_tolerated_one_is_not() -> None:
    allowed = [Drawn(98, 100, 50)] * 100
    missing = [Drawn(80, 100, 50)] * 100
    assert log_e_missing(allowed) < 0.0 < LOG_MISMATCH < log_e_missing(missing)
    assert log_e_missing([]) == pytest.approx(0.0)


# The bake with a live baseline.


def test_the_bake_keeps_a_live_baseline_and_then_takes_the_rest() -> None:
    plan = plan_with(bake_weight=80, bake_looks=10, settle_looks=2)
    rollout = Rollout(plan, Steady()).begin()
    assert rollout.run().verdict is Verdict.BAKED
    assert rollout.weights == [5, 25, 50, 75, 80, 100]
    phases = [look.phase for look in rollout.record.looks]
    assert phases == [Phase.COMPARE] * 20 + [Phase.BAKE] * 10 + [Phase.SETTLE] * 2
    baking = rollout.record.looks[20:30]
    assert all(one.baseline_requests for look in baking for one in look.gates[:3])


def test_a_bake_longer_than_a_step_may_be_is_no_reason_to_go_back() -> None:
    plan = plan_with(bake_weight=90, bake_looks=40, max_looks_per_step=30)
    assert Rollout(plan, Steady()).begin().run().verdict is Verdict.BAKED


def test_a_candidate_that_loses_its_proof_in_the_bake_never_gets_the_rest() -> None:
    """Errors stay just below harm, so there is no reason for a rollback, and none for all traffic either."""
    plan = plan_with(bake_weight=90, bake_looks=20, max_looks_per_step=25)
    drifting = Steady(requests=6000, errors=lambda _, weight: 0.024 if weight == 90 else 0.003)
    rollout = Rollout(replace_error_gate(plan), drifting).begin()
    last = rollout.run()
    assert rollout.weights == [5, 25, 50, 75, 90, 0]
    assert (last.verdict, last.reasons[0]) == (Verdict.ROLLBACK, "max_looks")
    assert last.number == 20 + 20 + 25


def replace_error_gate(plan: CanaryPlan) -> CanaryPlan:
    """Replace the error gate by one with harm at 5 % and proof below 1 %. Between them it decides neither way."""
    limits = {"ratio": 1.5, "harm": 0.05, "ok": 0.01, "slo_max": 0.05}
    return CanaryPlan.model_validate(plan.model_dump() | {"error_gate": limits})


def test_harm_to_both_in_the_bake_rolls_nobody_back() -> None:
    def make(bucket: int, weight: int) -> tuple[Served, Served]:
        share = 0.1 if 24 <= bucket <= 26 else 0.003
        n_c = 6 * weight
        return Served(600 - n_c, round((600 - n_c) * share)), Served(n_c, round(n_c * share))

    ends = [
        Rollout(plan_with(bake_weight=weight), make).begin().run().verdict for weight in (None, 95)
    ]
    assert ends == [Verdict.ROLLBACK, Verdict.BAKED]


def test_a_candidate_that_turns_bad_in_the_live_bake_goes_back() -> None:
    bad = Steady(errors=lambda _, weight: 0.2 if weight == 95 else 0.003)
    last = Rollout(plan_with(bake_weight=95), bad).begin().run()
    assert (last.phase, last.verdict, last.reason) == (Phase.BAKE, Verdict.ROLLBACK, "error_rate")


def test_at_100_after_the_live_bake_the_breaker_still_guards() -> None:
    bad = Steady(errors=lambda _, weight: 0.6 if weight == 100 else 0.003)
    last = Rollout(plan_with(bake_weight=95, bake_looks=3), bad).begin().run()
    assert (last.phase, last.reasons) == (Phase.SETTLE, ("circuit_breaker",))


def test_the_bake_s_weight_is_above_the_compared_steps() -> None:
    with pytest.raises(ValueError, match="bake_weight must be above the last step before 100"):
        plan_with(bake_weight=75)


# Warm-up and length.


def slow_at_first(bucket: int, weight: int) -> tuple[Served, Served]:
    baseline, candidate = Steady()(bucket, weight)
    cold = (1000.0, 2250.0, 3750.0)
    return baseline, replace(candidate, quantiles=cold if bucket < 3 else candidate.quantiles)


def test_a_cold_start_alone_does_not_roll_back() -> None:
    warm = Rollout(plan_with(), slow_at_first).begin()
    assert warm.run().verdict is Verdict.BAKED
    strict = Rollout(plan_with(warmup_looks=0), slow_at_first).begin().run()
    assert (strict.verdict, strict.reason, strict.number <= 3) == (
        Verdict.ROLLBACK,
        "latency",
        True,
    )


def test_a_candidate_still_slow_after_its_warm_up_is_rolled_back_right_then() -> None:
    slow = Steady(quantiles=(440.0, 1800.0, 4500.0))
    last = Rollout(plan_with(), slow).begin().run()
    assert last.number == 12
    assert set(last.reasons) <= {"harm:slow", "harm:very_slow"}
    assert (gate(last, "slow").z_now or 0.0) > Z_WARN


@pytest.mark.parametrize(("words", "holds"), [(8.0, True), (100.0, True), (60.0, False)])
def test_answers_of_another_length_hold_unless_they_are_meant(words: float, holds: bool) -> None:
    def make(_: int, weight: int) -> tuple[Served, Served]:
        n_c = 6 * weight
        return Served(600 - n_c, output=40.0 * (600 - n_c)), Served(n_c, output=words * n_c)

    plan = plan_with(max_looks_per_step=12)
    last = Rollout(plan, make).begin().run()
    assert (last.reason == "quality") is holds
    for meant in ({"output_length": None}, {"latency_gates": {"per_output_token": True}}):
        rollout = Rollout(plan_with(max_looks_per_step=12, **meant), make).begin()
        assert rollout.run().verdict is Verdict.BAKED
