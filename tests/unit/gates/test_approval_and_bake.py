"""A rollout that waits for a person's approval, and the bake behind the promotion, on a simulated service."""

from typing import Any

import pytest

from tests.unit.gates.rollouts import RUNNING, Rollout, Served, Steady, moment, plan_with
from tuneship.gates.canary import decide
from tuneship.gates.record import ApprovalAnswered, Phase, Verdict
from tuneship.gates.view import DeploymentState


def waiting() -> Rollout:
    rollout = Rollout(plan_with(approval="required"), Steady()).begin()
    while rollout.look().verdict is not Verdict.ASK:
        pass
    return rollout


def test_a_proven_candidate_waits_for_a_person_and_then_goes_to_100() -> None:
    rollout = waiting()
    for _ in range(7):
        look = rollout.look()
        assert (look.phase, look.verdict, look.reasons) == (Phase.WAIT, Verdict.HOLD, ("approval",))
    rollout.record = rollout.record.plus(ApprovalAnswered("promote", "ada"))
    assert rollout.look().verdict is Verdict.PROMOTE
    assert rollout.run().verdict is Verdict.BAKED


@pytest.mark.parametrize(
    ("decision", "reason"), [("roll back", "human_rejected"), ("timeout", "approval_timeout")]
)
def test_a_no_and_no_answer_both_go_back(decision: Any, reason: str) -> None:
    rollout = waiting()
    rollout.record = rollout.record.plus(ApprovalAnswered(decision, "ada"))
    look = rollout.look()
    assert (look.verdict, look.reason) == (Verdict.ROLLBACK, reason)


def test_errors_during_the_wait_beat_the_approval() -> None:
    rollout = waiting()
    rollout.make = Steady(errors=lambda *_: 0.2)
    rollout.record = rollout.record.plus(ApprovalAnswered("promote", "ada"))
    assert rollout.look().verdict is Verdict.HOLD, "one bucket alone does not decide"
    look = rollout.look()
    assert (look.phase, look.verdict, look.reason) == (Phase.WAIT, Verdict.ROLLBACK, "error_rate")


def test_a_late_regression_in_a_long_wait_is_found_within_ten_looks() -> None:
    rollout = waiting()
    for _ in range(60):
        rollout.look()
    rollout.make = Steady(errors=lambda *_: 0.05)
    looks = 0
    while rollout.look().verdict is Verdict.HOLD:
        looks += 1
        assert looks < 10


def test_errors_in_the_bake_go_back_to_the_baseline() -> None:
    rollout = Rollout(
        plan_with(), Steady(errors=lambda _, weight: 0.05 if weight == 100 else 0.003)
    ).begin()
    last = rollout.run()
    assert (last.phase, last.verdict, last.reason) == (Phase.BAKE, Verdict.ROLLBACK, "error_rate")
    assert rollout.weights == [5, 25, 50, 75, 100, 0]
    assert rollout.record.looks[-1].number <= 24


def test_a_bake_without_traffic_passes_and_says_so() -> None:
    rollout = Rollout(plan_with(bake_looks=6), Steady()).begin()
    while rollout.look().verdict is not Verdict.PROMOTE:
        pass
    rollout.make = lambda *_: (Served(), Served())
    last = rollout.run()
    assert last.verdict is Verdict.BAKED
    assert last.warnings == ("low_traffic",)


def test_a_live_bake_waits_for_the_traffic_of_the_morning_as_a_step_does() -> None:
    plan = plan_with(bake_weight=80, wait_for_traffic="12h")
    rollout = Rollout(plan, Steady()).begin()
    while rollout.look().verdict is not Verdict.PROMOTE:
        pass
    by_day, rollout.make = rollout.make, lambda *_: (Served(), Served())
    assert {rollout.look().verdict for _ in range(300)} == {Verdict.HOLD}
    rollout.make = by_day
    assert rollout.run().verdict is Verdict.BAKED


def test_a_live_bake_without_traffic_ends_when_a_step_would() -> None:
    plan = plan_with(bake_weight=80, wait_for_traffic="3h")
    rollout = Rollout(plan, Steady()).begin()
    while rollout.look().verdict is not Verdict.PROMOTE:
        pass
    rollout.make = lambda *_: (Served(), Served())
    assert "max_looks" in rollout.run().reasons
    assert sum(look.phase is Phase.BAKE for look in rollout.record.looks) == 210


@pytest.mark.parametrize("bake_weight", [80, None])
def test_a_bake_counts_new_buckets_however_often_one_looks(bake_weight: int | None) -> None:
    rollout = Rollout(plan_with(bake_weight=bake_weight), Steady()).begin()
    while rollout.look().verdict is not Verdict.PROMOTE:
        pass
    began = len(rollout.rows)
    while rollout.record.phase is Phase.BAKE and rollout.look().verdict is Verdict.HOLD:
        for part in (0.25, 0.5, 0.75):
            seen = rollout.observe()
            for metrics in (seen.baseline_metrics, seen.candidate_metrics):
                assert isinstance(metrics, dict)
                metrics["end_time"] = moment(len(rollout.rows) + part)
            look = decide(seen, rollout.plan, rollout.record)
            assert look.verdict is Verdict.HOLD
            rollout.record = rollout.record.plus(look)
    assert len(rollout.rows) - began == rollout.plan.bake_looks


def test_a_bake_with_the_baseline_gone_cannot_go_back() -> None:
    rollout = Rollout(
        plan_with(), Steady(errors=lambda _, weight: 0.9 if weight == 100 else 0.003)
    ).begin()
    while rollout.look().verdict is not Verdict.PROMOTE:
        pass
    rollout.seen = lambda _: (DeploymentState("missing"), RUNNING)
    look = rollout.look()
    assert (look.verdict, look.reason) == (Verdict.ABORT, "baseline_missing")
