"""Whole rollouts against a simulated service: the worked scenarios, the order of the rules, and what never happens."""

import json
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.gates.rollouts import (
    RUNNING,
    START,
    Rollout,
    Served,
    Steady,
    lines_of,
    moment,
    plan_with,
)
from tuneship.gates.canary import first_difference, replay
from tuneship.gates.record import (
    Look,
    Probed,
    Resumed,
    RolloutRecord,
    Verdict,
    from_lines,
    to_line,
)
from tuneship.gates.view import DeploymentState

BOTH = pytest.mark.parametrize("extended", [True, False], ids=["extension", "bare"])


def fifth_of_them_from(weight: int) -> Callable[[int, int], float]:
    return lambda _, now: 0.2 if now >= weight else 0.003


# The worked scenarios.


@BOTH
def test_s1_equal_deployments_are_promoted_at_look_twenty_and_baked(extended: bool) -> None:
    rollout = Rollout(plan_with(), Steady(), extended=extended).begin()
    assert rollout.run().verdict is Verdict.BAKED
    assert rollout.weights == [5, 25, 50, 75, 100]
    promoted = next(look for look in rollout.record.looks if look.verdict is Verdict.PROMOTE)
    assert promoted.number == 20
    assert {gate.state for gate in promoted.gates} <= {"proven", "not_available", "disabled"}
    for weight in (5, 25, 50, 75):
        assert sum(look.brought_data for look in rollout.record.looks if look.weight == weight) >= 5


@BOTH
def test_s2_errors_from_25_percent_on_go_back_by_look_seven(extended: bool) -> None:
    rollout = Rollout(plan_with(), Steady(errors=fifth_of_them_from(25)), extended=extended).begin()
    last = rollout.run()
    assert rollout.weights == [5, 25, 0]
    assert (last.verdict, last.reason, last.number) == (Verdict.ROLLBACK, "error_rate", 7)
    error = last.gates[0]
    assert error.log_u_harm is not None
    assert error.log_u_harm >= math.log(1e6)


@BOTH
def test_s3_a_slow_candidate_goes_back_for_latency_at_look_twelve(extended: bool) -> None:
    slow = Steady(quantiles=(440.0, 1800.0, 4500.0))
    last = Rollout(plan_with(), slow, extended=extended).begin().run()
    assert (last.verdict, last.reason, last.number) == (Verdict.ROLLBACK, "latency", 12)
    assert "harm:slow" in last.reasons


def silent_candidate(kind: str) -> Callable[..., tuple[Any, Any]]:
    def answers(_: int, baseline: dict[str, Any], candidate: dict[str, Any]) -> tuple[Any, Any]:
        for metric in candidate["metrics"].values():
            if kind == "empty":
                metric.update({name: [] for name in metric if name != "histogram"})
        if kind == "nulls":
            stamps = candidate["metrics"]["throughput"]["timestamps"]
            for metric in candidate["metrics"].values():
                metric.update({name: [None] * len(stamps) for name in metric})
                metric["timestamps"] = stamps
                metric.pop("complete", None)
        if kind == "absent":
            candidate["metrics"] = {}
        return baseline, candidate

    return answers


def without_candidate(bucket: int, weight: int) -> tuple[Served, Served]:
    return Served(570, output=570 * 40.0), Served()


@BOTH
@pytest.mark.parametrize("kind", ["zeros", "empty", "nulls", "absent"])
@pytest.mark.parametrize(
    ("policy", "verdict"), [("rollback", Verdict.ROLLBACK), ("pause", Verdict.PAUSE)]
)
def test_s4_a_candidate_without_requests_stays_at_five(
    kind: str, policy: str, verdict: Verdict, extended: bool
) -> None:
    plan = plan_with(max_looks_per_step=15, on_inconclusive=policy)
    rollout = Rollout(
        plan, without_candidate, extended=extended, answers=silent_candidate(kind)
    ).begin()
    last = rollout.run()
    assert (last.verdict, last.reason, last.number) == (verdict, "insufficient_data", 15)
    assert 25 not in rollout.weights
    assert all("insufficient_data" in look.reasons for look in rollout.record.looks)


@pytest.mark.parametrize("kind", ["zeros", "empty", "nulls", "absent"])
def test_a_candidate_whose_requests_nobody_counts_is_not_waited_for_until_the_morning(
    kind: str,
) -> None:
    plan = plan_with(max_looks_per_step=15, wait_for_traffic="12h")
    rollout = Rollout(plan, without_candidate, answers=silent_candidate(kind)).begin()
    last = rollout.run()
    # Of the 570 requests of the baseline in a minute follow 30 of the candidate: each look counts whole.
    assert (last.verdict, last.reason, last.number) == (Verdict.ROLLBACK, "insufficient_data", 15)


@BOTH
def test_s5_three_failed_looks_neither_advance_nor_roll_back(extended: bool) -> None:
    def answers(look: int, baseline: Any, candidate: Any) -> tuple[Any, Any]:
        return (None, None) if 5 <= look <= 7 else (baseline, candidate)

    rollout = Rollout(plan_with(), Steady(), extended=extended, answers=answers).begin()
    assert rollout.run().verdict is Verdict.BAKED
    failed = rollout.record.looks[4:7]
    assert [look.verdict for look in failed] == [Verdict.HOLD] * 3
    assert all("metrics_missing" in look.reasons for look in failed)
    assert rollout.record.looks[7].verdict is Verdict.ADVANCE


@BOTH
def test_s6_a_restart_at_every_look_changes_nothing(extended: bool) -> None:
    """The record is written to lines and read again before each look, as after SIGKILL."""
    calm = Rollout(plan_with(), Steady(), extended=extended).begin()
    killed = Rollout(plan_with(), Steady(), extended=extended).begin()
    calm.run()
    while killed.look().verdict is not Verdict.BAKED:
        killed.record = from_lines(lines_of(killed.record.facts))
    assert killed.record == calm.record


def test_a_restart_two_buckets_later_goes_on_at_the_same_weight() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    while rollout.record.weight < 50:
        rollout.look()
    rollout.rows += [rollout.make(len(rollout.rows), 50), rollout.make(len(rollout.rows) + 1, 50)]
    look = rollout.look()
    assert (look.weight, look.step_buckets, look.verdict) == (50, 3, Verdict.HOLD)
    rollout.run()
    assert rollout.weights == [5, 25, 50, 75, 100]


# Replay.


@BOTH
def test_replay_decides_every_look_again_bit_by_bit(extended: bool) -> None:
    rollout = Rollout(plan_with(), Steady(errors=fifth_of_them_from(50)), extended=extended).begin()
    rollout.run()
    record = from_lines(lines_of(rollout.record.facts))
    assert [recorded for recorded, _ in replay(record)] == record.looks
    assert all(recorded == decided for recorded, decided in replay(record))


def test_a_replay_names_the_first_field_that_differs() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    rollout.run()
    changed = tuple(
        replace(fact, gates=(replace(fact.gates[0], candidate_bad=7), *fact.gates[1:]))
        if isinstance(fact, Look) and fact.number == 4
        else fact
        for fact in rollout.record.facts
    )
    found = [first_difference(*pair) for pair in replay(RolloutRecord(changed))]
    assert found[3] == ".gates.0.candidate_bad: recorded 7, decided 0"
    assert set(found[:3] + found[4:]) == {None}


def test_answers_need_not_reach_back_to_what_was_counted() -> None:
    """The record has what a look counted, whatever the server says of it later."""

    def newest(look: int, *answers: dict[str, Any]) -> tuple[Any, Any]:
        for answer in answers:
            for series in answer["metrics"].values():
                first = bisect_left(series["timestamps"], moment(look - 2))
                series |= {name: values[first:] for name, values in series.items()}
        return answers

    whole = Rollout(plan_with(), Steady()).begin()
    short = Rollout(plan_with(), Steady(), answers=newest).begin()
    whole.run()
    short.run()
    assert short.record == whole.record
    assert [bucket.end for bucket in short.record.kept.buckets] == [
        START + timedelta(minutes=1 + i) for i in range(len(short.rows))
    ]


def test_the_look_is_plain_json_with_every_limit_beside_its_value() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    line = json.loads(to_line(rollout.look()))
    error = line["gates"][0]
    assert (error["candidate_requests"], error["harm_limit"], error["z_limit"]) == (30, 0.01, 1.645)
    assert error["log_e_harm_limit"] == pytest.approx(math.log(4 / 0.05))


# The rules in their order.


def test_a_failed_candidate_goes_back_at_once() -> None:
    for status in ("failed", "deleting", "deleted", "missing"):
        rollout = Rollout(
            plan_with(), Steady(), seen=lambda _, s=status: (RUNNING, DeploymentState(s))
        ).begin()
        look = rollout.look()
        assert (look.verdict, look.reason) == (Verdict.ROLLBACK, "candidate_failed")


@pytest.mark.parametrize("candidate", ["running", "failed"])
def test_without_a_baseline_no_rollback_is_possible(candidate: str) -> None:
    rollout = Rollout(
        plan_with(),
        Steady(),
        seen=lambda _: (DeploymentState("missing"), DeploymentState(candidate)),
    ).begin()
    look = rollout.look()
    assert (look.verdict, look.reason) == (Verdict.ABORT, "baseline_missing")


def test_half_of_a_bucket_failing_trips_the_breaker() -> None:
    rollout = Rollout(plan_with(), lambda *_: (Served(570), Served(30, 15))).begin()
    look = rollout.look()
    assert (look.verdict, look.reason, look.reasons) == (
        Verdict.ROLLBACK,
        "error_rate",
        ("circuit_breaker",),
    )


def test_a_shared_incident_trips_nothing() -> None:
    def make(bucket: int, weight: int) -> tuple[Served, Served]:
        n_c = 6 * weight
        share = 0.1 if 3 <= bucket <= 5 else 0.003
        n_b = 600 - n_c
        return Served(n_b, round(n_b * share)), Served(n_c, round(n_c * share))

    rollout = Rollout(plan_with(), make).begin()
    for _ in range(12):
        assert rollout.look().verdict in (Verdict.HOLD, Verdict.ADVANCE)
    assert any("baseline_unhealthy" in look.reasons for look in rollout.record.looks)


def test_a_baseline_that_fails_never_wins_over_a_healthy_candidate() -> None:
    def make(_: int, weight: int) -> tuple[Served, Served]:
        n_c = 6 * weight
        return Served(600 - n_c, (600 - n_c) // 12), Served(n_c)

    assert Rollout(plan_with(), make).begin().run().verdict is Verdict.BAKED


def test_a_broken_baseline_beside_a_sick_candidate_is_left_to_a_person() -> None:
    plan = plan_with(max_looks_per_step=8)
    rollout = Rollout(plan, lambda *_: (Served(570, 500), Served(30, 10))).begin()
    last = rollout.run()
    assert (last.verdict, last.reason) == (Verdict.PAUSE, "baseline_unhealthy")
    assert last.warnings == ("baseline_broken",)
    assert 25 not in rollout.weights


def test_ten_looks_without_metrics_roll_back_and_blame_nobody() -> None:
    rollout = Rollout(plan_with(), Steady(), answers=lambda *_: (None, {})).begin()
    last = rollout.run()
    assert (last.verdict, last.reason, last.number) == (Verdict.ROLLBACK, "metrics_unavailable", 10)


def test_an_early_warning_holds_the_exposure() -> None:
    """With 3 % errors against 0.3 % the z-score warns before the evidence suffices."""
    rollout = Rollout(plan_with(), Steady(errors=lambda *_: 0.03)).begin()
    last = rollout.run()
    held = [look for look in rollout.record.looks if "early_warning:error" in look.reasons]
    assert held
    assert held[0].weight == 5
    assert last.verdict is Verdict.ROLLBACK
    assert last.reason == "error_rate"


UNFIT = {
    "candidate updating": (RUNNING, DeploymentState("updating")),
    "baseline updating": (DeploymentState("updating"), RUNNING),
    "candidate without replicas": (RUNNING, DeploymentState("running", 0)),
    "baseline not to be asked": (DeploymentState(None), RUNNING),
}


@pytest.mark.parametrize("seen", UNFIT.values(), ids=UNFIT.keys())
def test_weight_moves_only_between_running_deployments(
    seen: tuple[DeploymentState, DeploymentState],
) -> None:
    rollout = Rollout(plan_with(), Steady(), seen=lambda _: seen).begin()
    for _ in range(8):
        assert rollout.look().verdict is Verdict.HOLD


def test_a_gate_without_limits_blocks_the_promotion() -> None:
    plan = plan_with(error_gate={"ratio": None}, max_looks_per_step=8)
    rollout = Rollout(plan, Steady()).begin()
    last = rollout.run()
    assert (last.verdict, last.reason) == (Verdict.ROLLBACK, "insufficient_data")
    assert "not_evaluated:error" in last.reasons


def test_a_disabled_gate_blocks_nothing_and_is_reported() -> None:
    plan = plan_with(error_gate=None, quality_gates=None, latency_gates={"slow": None})
    rollout = Rollout(plan, Steady(errors=lambda *_: 0.04)).begin()
    assert rollout.run().verdict is Verdict.BAKED
    states = {gate.name: gate.state for gate in rollout.record.looks[0].gates}
    assert (states["error"], states["slow"], states["empty"]) == (
        "disabled",
        "disabled",
        "disabled",
    )


def test_two_equally_bad_deployments_are_not_promoted() -> None:
    plan = plan_with(error_gate={"ok": 0.2, "harm": 0.1, "slo_max": 0.05}, max_looks_per_step=12)

    def six_percent(_: int, weight: int) -> tuple[Served, Served]:
        n_c = 6 * weight
        return Served(600 - n_c, round((600 - n_c) * 0.06)), Served(n_c, round(n_c * 0.06))

    rollout = Rollout(plan, six_percent).begin()
    last = rollout.run()
    assert (last.verdict, last.reason) == (Verdict.PAUSE, "baseline_unhealthy")


def test_an_unproven_candidate_waits_and_says_how_long() -> None:
    few = Rollout(plan_with(min_requests_per_step=1), Steady(requests=20)).begin()
    while few.record.weight < 75 or few.look().reasons[:1] == ("dwell",):
        few.look()
    look = few.look()
    assert look.reasons[0].startswith("not_proven:")
    assert look.needed.endswith("looks")


def test_latency_gates_hold_until_a_hundred_baseline_answers() -> None:
    rollout = Rollout(plan_with(), Steady(requests=100)).begin()
    looks = [rollout.look() for _ in range(3)]
    pending = ["latency_limits_pending" in look.reasons for look in looks]
    assert pending == [True, False, False]
    assert looks[2].limits is not None
    assert looks[2].limits.slow_ms == pytest.approx(900.0)


def test_longer_answers_at_the_same_speed_may_take_longer_when_the_plan_says_so() -> None:
    def make(bucket: int, weight: int) -> tuple[Served, Served]:
        n_c = 6 * weight
        slow = (800.0, 1800.0, 3000.0)
        return Served(600 - n_c, output=(600 - n_c) * 20.0), Served(
            n_c, output=n_c * 40.0, quantiles=slow
        )

    strict = Rollout(plan_with(), make).begin().run()
    assert (strict.verdict, strict.reason) == (Verdict.ROLLBACK, "latency")
    scaled = Rollout(plan_with(latency_gates={"per_output_token": True}), make).begin()
    assert scaled.run().verdict is Verdict.BAKED
    assert "output_tokens" in scaled.record.looks[3].warnings


# Quality, from three sources.


def half_empty(bucket: int, weight: int) -> tuple[Served, Served]:
    n_c = 6 * weight
    return Served(600 - n_c, output=40.0 * (600 - n_c)), Served(
        n_c, empty=n_c // 2, output=n_c * 5.0
    )


def test_published_counts_of_empty_answers_roll_back_for_quality() -> None:
    last = Rollout(plan_with(), half_empty).begin().run()
    assert (last.verdict, last.reason, last.reasons) == (
        Verdict.ROLLBACK,
        "quality",
        ("harm:empty",),
    )


def count_empty(baseline: Served, candidate: Served) -> Probed:
    bad = {"empty": candidate.empty}
    return Probed(
        candidate.requests, baseline.requests, candidate_bad=bad, baseline_bad={"empty": 0}
    )


TRAFFIC = {"prompts": "p.jsonl", "requests_per_second": 10.0}


def test_the_driver_s_counts_do_as_well() -> None:
    rollout = Rollout(
        plan_with(traffic=TRAFFIC), half_empty, extended=False, probe=count_empty
    ).begin()
    last = rollout.run()
    assert (last.verdict, last.reason) == (Verdict.ROLLBACK, "quality")


def test_a_driver_that_falls_silent_is_a_missing_look() -> None:
    rollout = Rollout(plan_with(traffic=TRAFFIC), Steady(), extended=False).begin()
    look = rollout.look()
    assert look.missing == "no counts from the traffic driver"
    assert "metrics_missing" in look.reasons


def test_without_any_source_much_shorter_answers_hold() -> None:
    rollout = Rollout(plan_with(max_looks_per_step=20), half_empty, extended=False).begin()
    last = rollout.run()
    assert (last.verdict, last.reason) == (Verdict.ROLLBACK, "quality")
    assert last.gates[3].state == "not_available"


def test_a_candidate_whose_probes_all_fail_goes_back_though_metrics_say_nothing() -> None:
    def probe(baseline: Served, candidate: Served) -> Probed:
        return Probed(10, 100, candidate_failed=10)

    rollout = Rollout(
        plan_with(traffic=TRAFFIC), without_candidate, extended=False, probe=probe
    ).begin()
    assert [rollout.look().verdict for _ in range(2)] == [Verdict.HOLD, Verdict.ROLLBACK]


# Freshness.


def test_a_series_that_stands_still_holds_from_the_third_look_and_ends_at_the_tenth() -> None:
    def frozen(look: int, baseline: Any, candidate: Any) -> tuple[Any, Any]:
        if look > 6:
            for answer in (baseline, candidate):
                for metric in answer["metrics"].values():
                    keep = [
                        i for i, at in enumerate(metric["timestamps"]) if at < "2026-01-01T00:06"
                    ]
                    metric.update({k: [v[i] for i in keep] for k, v in metric.items()})
        return baseline, candidate

    rollout = Rollout(plan_with(), Steady(), answers=frozen).begin()
    last = rollout.run()
    standing = rollout.record.looks[6:]
    assert all(look.standing for look in standing)
    assert ["metrics_stale" in look.reasons for look in standing] == [False, False] + [True] * 7 + [
        False
    ]
    assert (last.reason, last.number) == ("metrics_unavailable", 16)


def test_a_repeated_answer_is_no_new_data() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    rollout.look()
    before = rollout.rows
    rollout.rows = before[:-1]
    rollout.make = lambda *_: before[-1]
    look = rollout.look()
    assert look.standing
    assert "no_new_data" in look.reasons


def test_a_throughput_that_turns_null_changes_nothing_that_was_counted() -> None:
    def answers(look: int, baseline: Any, candidate: Any) -> tuple[Any, Any]:
        if look == 3:
            candidate["metrics"]["throughput"]["requests_per_second"][1] = None
        return baseline, candidate

    rollout = Rollout(plan_with(), Steady(), answers=answers).begin()
    calm = Rollout(plan_with(), Steady()).begin()
    assert [rollout.look() for _ in range(4)] == [calm.look() for _ in range(4)]


def test_a_resumed_roll_out_has_its_looks_again() -> None:
    plan = plan_with(max_looks_per_step=6, on_inconclusive="pause")
    rollout = Rollout(plan, without_candidate).begin()
    assert rollout.run().verdict is Verdict.PAUSE
    rollout.record = rollout.record.plus(Resumed("ada"))
    assert [rollout.look().verdict for _ in range(6)] == [Verdict.HOLD] * 5 + [Verdict.PAUSE]


def test_there_is_nothing_to_look_at_before_the_first_shift_or_after_a_rollback() -> None:
    rollout = Rollout(plan_with(), Steady(errors=lambda *_: 0.9)).begin()
    assert rollout.run().verdict is Verdict.ROLLBACK
    with pytest.raises(ValueError, match="no traffic"):
        rollout.look()
