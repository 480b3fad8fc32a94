"""Laws that hold for every rollout, whatever the service answers."""

import random
from datetime import datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gates.rollouts import RUNNING, START, Rollout, Served, Steady, lines_of, plan_with
from tuneship.gates.record import (
    ApprovalAnswered,
    Look,
    Phase,
    RolloutRecord,
    Verdict,
    from_lines,
)
from tuneship.gates.view import DeploymentState


class Chaos:
    """Random traffic, faults and states from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a test draws these numbers
        self.errors = self.random.choice([0.0, 0.003, 0.03, 0.3])

    def make(self, bucket: int, weight: int) -> tuple[Served, Served]:
        total = self.random.choice([0, 3, 60, 600])
        n_c = sum(self.random.random() < weight / 100 for _ in range(total))
        x_c = sum(self.random.random() < self.errors for _ in range(n_c))
        return Served(total - n_c), Served(n_c, x_c)

    def answers(self, _: int, baseline: Any, candidate: Any) -> tuple[Any, Any]:
        fate = self.random.random()
        if fate < 0.1:
            return None, candidate
        if fate < 0.15:
            candidate["metrics"]["error_rate"]["percentage"] = ["?"]
        if fate < 0.2:
            return baseline, {}
        return baseline, candidate

    def seen(self, _: int) -> tuple[DeploymentState, DeploymentState]:
        return RUNNING, self.random.choice(
            [RUNNING] * 6 + [DeploymentState("updating"), DeploymentState(None)]
        )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([None, 51, 90]))
def test_weights_only_climb_the_steps_or_drop_to_zero(
    seed: int, extended: bool, asked: bool, bake_weight: int | None
) -> None:
    chaos = Chaos(seed)
    plan = plan_with(
        steps=[10, 50, 100],
        min_looks_per_step=2,
        max_looks_per_step=12,
        bake_looks=3,
        bake_weight=bake_weight,
        settle_looks=2,
        approval="required" if asked else "never",
    )

    def answer(record: RolloutRecord) -> RolloutRecord:
        is_waiting = record.phase is Phase.WAIT and record.answer is None
        return (
            record.plus(ApprovalAnswered("promote"))
            if is_waiting and chaos.random.random() < 0.3
            else record
        )

    rollout = Rollout(
        plan, chaos.make, extended=extended, answers=chaos.answers, seen=chaos.seen, act=answer
    ).begin()
    last = rollout.run(most=80)
    assert last.verdict in (Verdict.BAKED, Verdict.ROLLBACK, Verdict.HOLD)
    climbed = rollout.weights[:-1] if rollout.weights[-1] == 0 else rollout.weights
    weights = [*plan.compared_steps, *([bake_weight] if bake_weight else []), 100]
    assert climbed == weights[: len(climbed)]
    if last.verdict is Verdict.BAKED:
        assert climbed == weights
    for look, following in zip(rollout.record.looks, rollout.record.looks[1:], strict=False):
        assert_lawful(look, following)
    for look in rollout.record.looks:
        if look.next_weight is not None and look.next_weight > plan.known_steps[-2]:
            tested = [
                gate.state for gate in look.gates if gate.state not in ("disabled", "not_available")
            ]
            assert tested
            assert set(tested) == {"proven"}


def assert_lawful(look: Look, following: Look) -> None:
    moved = look.verdict in (Verdict.ADVANCE, Verdict.PROMOTE)
    assert following.weight == (look.next_weight if moved else look.weight)
    if moved:
        assert look.missing is None
        assert look.brought_data or look.phase is Phase.WAIT
        assert look.candidate_status == "running"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 19), st.integers(1, 40))
def test_more_candidate_errors_never_turn_a_hold_or_rollback_into_an_advance(
    seed: int, look_number: int, more: int
) -> None:
    """They may turn a rollback into a hold, because one burst in one bucket alone is no proof of harm."""
    onward = (Verdict.ADVANCE, Verdict.PROMOTE)
    chaos = Chaos(seed)
    rollout = Rollout(
        plan_with(steps=[10, 25, 50, 100]), Steady(errors=lambda *_: chaos.errors)
    ).begin()
    for _ in range(look_number + 1):
        if rollout.look().verdict is Verdict.ROLLBACK:
            break
    before = rollout.record.looks[-1]
    rollout.record = RolloutRecord(rollout.record.facts[: rollout.record.facts.index(before)])
    bucket = chaos.random.randrange(len(rollout.rows))
    baseline, candidate = rollout.rows[bucket]
    worse = Served(
        candidate.requests,
        min(candidate.requests, candidate.errors + more),
        output=candidate.output,
    )
    last = rollout.rows[-1] if bucket != len(rollout.rows) - 1 else (baseline, worse)
    rollout.rows[bucket] = (baseline, worse)
    rollout.rows.pop()
    rollout.make = lambda *_: last
    assert rollout.look().verdict not in onward or before.verdict in onward


def test_shrinking_the_buckets_and_the_looks_together_changes_no_verdict() -> None:
    def verdicts(interval: str) -> list[tuple[Verdict, tuple[str, ...]]]:
        plan = plan_with(interval=interval, look_every_seconds=1.0)
        rollout = Rollout(
            plan, Steady(errors=lambda _, weight: 0.2 if weight >= 50 else 0.003)
        ).begin()
        rollout.run()
        return [(look.verdict, look.reasons) for look in rollout.record.looks]

    assert verdicts("1m") == verdicts("1s") == verdicts("1h")


def test_the_roll_out_may_begin_before_the_service_s_clock_is_known() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    facts = list(rollout.record.facts)
    assert isinstance(facts[-1].at, datetime)
    assert facts[-1].at == START
    rollout.record = from_lines(
        lines_of(facts, lambda line: line.replace('"2026-01-01T00:00:00Z"', "null"))
    )
    assert rollout.run().verdict is Verdict.BAKED
