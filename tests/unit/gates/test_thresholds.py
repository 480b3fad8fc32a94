"""Plain thresholds stop a rollout that exceeds them, and are never a reason to go on."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gates.rollouts import EDGES, Rollout, Served, Steady, lines_of, plan_with
from tests.unit.gates.test_canary_laws import Chaos
from tuneship.gates.canary import Observed, decide
from tuneship.gates.gate_types import ThresholdReading
from tuneship.gates.record import Look, Phase, RolloutRecord, Verdict, from_lines

# Verdicts of a look by rank. Every verdict that goes on has rank 2.
ORDER = {Verdict.ROLLBACK: 0, Verdict.PAUSE: 0, Verdict.HOLD: 1}
NO_GATES: dict[str, Any] = {
    "crash": None,
    "error_gate": None,
    "latency_gates": None,
    "quality_gates": None,
}


def served(requests: int = 200, **bad: Any) -> Served:
    return Served(requests, **bad)


def last_look(candidate: Served, limits: dict[str, Any], times: int = 1) -> Look:
    """Return the last of this many looks, decided by the plain thresholds alone."""
    plan = plan_with(**NO_GATES, thresholds=limits, min_looks_per_step=50)
    rollout = Rollout(plan, lambda *_: (served(), candidate)).begin()
    return [rollout.look() for _ in range(times)][-1]


BAD: dict[str, tuple[Any, ...]] = {
    "error_rate_percentage": (2.0, served(errors=5), 2.5, "error_rate"),
    "latency_p95_ms": (899.0, served(), 900.0, "latency"),
    "empty_percentage": (2.0, served(empty=5), 2.5, "quality"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_above_its_limit_rolls_back_with_both_in_the_look(name: str) -> None:
    limit, candidate, value, reason = BAD[name]
    look = last_look(candidate, {name: limit})
    assert (look.verdict, look.reason) == (Verdict.ROLLBACK, reason)
    assert look.reasons == (f"threshold:{name}",)
    assert look.thresholds == (ThresholdReading(name, reason, limit, value, 200),)


@pytest.mark.parametrize("name", BAD)
def test_a_value_at_its_limit_is_within_it(name: str) -> None:
    _, candidate, value, _ = BAD[name]
    assert last_look(candidate, {name: value}).reasons == ("dwell",)


@pytest.mark.parametrize("name", BAD)
def test_hold_holds(name: str) -> None:
    limit, candidate, _, _ = BAD[name]
    look = last_look(candidate, {name: limit, "action": "hold"})
    assert (look.verdict, look.reasons) == (Verdict.HOLD, (f"threshold:{name}",))


def test_too_few_requests_give_no_value_and_no_reason() -> None:
    few = served(99, errors=99 // 3)
    look = last_look(few, {"error_rate_percentage": 1.0})
    assert (look.thresholds[0].value, look.thresholds[0].requests) == (None, 99)
    assert not any(reason.startswith("threshold") for reason in look.reasons)
    assert last_look(few, {"error_rate_percentage": 1.0}, times=2).verdict is Verdict.ROLLBACK


def test_a_server_that_publishes_no_empty_answers_gives_no_value() -> None:
    plan = plan_with(**NO_GATES, thresholds={"empty_percentage": 1.0})
    rollout = Rollout(plan, lambda *_: (served(), served(empty=100)), extended=False).begin()
    assert rollout.look().thresholds[0].value is None


def test_only_the_newest_looks_of_the_step_are_measured() -> None:
    plan = plan_with(
        **NO_GATES,
        min_looks_per_step=50,
        thresholds={"error_rate_percentage": 10.0, "looks": 3, "action": "hold"},
    )
    rollout = Rollout(
        plan, lambda bucket, _: (served(), served(errors=60 if bucket < 2 else 0))
    ).begin()
    assert [rollout.look().thresholds[0].value for _ in range(6)] == [30, 30, 20, 10, 0, 0]


def test_the_p95_is_that_of_all_answers_where_there_are_histograms() -> None:
    fast, slow = [200] * len(EDGES), [0] * (len(EDGES) - 2) + [200, 200]
    plan = plan_with(**NO_GATES, thresholds={"latency_p95_ms": 2000.0}, min_looks_per_step=50)
    rollout = Rollout(
        plan,
        lambda bucket, _: (
            served(histogram=fast),
            served(histogram=slow if bucket == 1 else fast),
        ),
    ).begin()
    assert rollout.look().verdict is Verdict.HOLD
    look = rollout.look()
    assert look.thresholds[0].value == pytest.approx(2048 * 2**0.9)
    assert look.verdict is Verdict.ROLLBACK


def test_a_regression_in_the_bake_is_returned_by_a_threshold_alone() -> None:
    thresholds = {"error_rate_percentage": 2.0}
    plan = plan_with(thresholds=thresholds)
    rollout = Rollout(plan, Steady(errors=lambda _, weight: 0.03 if weight == 100 else 0.0)).begin()
    look = rollout.run()
    assert (look.phase, look.verdict) == (Phase.BAKE, Verdict.ROLLBACK)
    assert look.reasons == ("threshold:error_rate_percentage",)


def test_thresholds_alone_prove_nothing() -> None:
    limits = {"ratio": None, "harm": None, "ok": None}
    plan = plan_with(error_gate=limits, thresholds={"error_rate_percentage": 50.0})
    rollout = Rollout(plan, Steady()).begin()
    assert rollout.run().verdict is Verdict.ROLLBACK
    assert 100 not in rollout.weights


class ObservedRollout(Rollout):
    """A rollout that keeps the observation by which its last look was decided."""

    observed: Observed

    def observe(self) -> Observed:
        self.observed = super().observe()
        return self.observed


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 20), st.floats(100, 2000), st.booleans())
def test_thresholds_never_bring_a_candidate_further(
    seed: int, percentage: float, p95_ms: float, holds: bool
) -> None:
    chaos = Chaos(seed)
    changes = {"steps": [10, 50, 100], "min_looks_per_step": 2, "bake_looks": 3}
    thresholds = {
        "error_rate_percentage": percentage,
        "latency_p95_ms": p95_ms,
        "action": "hold" if holds else "rollback",
    }
    bare, limited = plan_with(**changes), plan_with(**changes, thresholds=thresholds)
    rollout = ObservedRollout(bare, chaos.make, answers=chaos.answers, seen=chaos.seen).begin()
    assert isinstance(rollout, ObservedRollout)
    for _ in range(40):
        before = rollout.record
        look = rollout.look()
        with_limits = decide(rollout.observed, limited, before)
        assert ORDER.get(with_limits.verdict, 2) <= ORDER.get(look.verdict, 2)
        if not any(one.is_above for one in with_limits.thresholds):
            assert replace(with_limits, thresholds=()) == look
        if look.verdict in (Verdict.ROLLBACK, Verdict.BAKED, Verdict.ABORT):
            break


def test_a_record_keeps_the_thresholds() -> None:
    look = last_look(served(errors=5), {"error_rate_percentage": 2.0})
    assert from_lines(lines_of([look])) == RolloutRecord((look,))


@pytest.mark.parametrize(
    ("thresholds", "said"),
    [
        ({}, "at least one of"),
        ({"looks": 3}, "at least one of"),
        ({"error_rate_percentage": 100}, "less than 100"),
        ({"error_rate_percentage": -1}, "greater than or equal to 0"),
        ({"latency_p95_ms": 0}, "greater than 0"),
        ({"latency_p95_ms": float("nan")}, "finite"),
        ({"empty_percentage": "1"}, "valid number"),
        ({"error_rate_percentage": 1, "looks": 0}, "greater than or equal to 1"),
        ({"error_rate_percentage": 1, "min_requests": 0}, "greater than or equal to 1"),
        ({"error_rate_percentage": 1, "action": "advance"}, "'rollback' or 'hold'"),
        ({"error_rate": 1}, "Extra inputs"),
    ],
)
def test_a_threshold_without_a_meaning_is_refused(thresholds: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_with(thresholds=thresholds)
