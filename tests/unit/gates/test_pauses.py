"""A person pauses a rollout: it holds however long that takes, nothing that speaks against the candidate waits."""

from typing import Any

import pytest

from tests.unit.gates.rollouts import Rollout, Steady, lines_of, plan_with
from tuneship.gates.canary import replay
from tuneship.gates.record import Phase, Resumed, Verdict, from_lines
from tuneship.gates.view import DeploymentState


def paused_between(first: int, last: int, make: Any = None, **plan: Any) -> Rollout:
    """A rollout that is paused from one bucket to another."""
    steady = make or Steady()
    rollout = Rollout(plan_with(**plan), steady, paused=lambda bucket: first <= bucket <= last)
    return rollout.begin()


def test_a_pause_outlasts_the_looks_of_the_plan_which_count_from_its_end() -> None:
    limits: dict[str, Any] = {"max_looks_per_step": 8, "max_looks": 30}
    rollout = paused_between(3, 60, **limits)
    while len(rollout.rows) < 60:
        look = rollout.look()
        assert look.verdict is Verdict.HOLD
        assert look.is_paused == (len(rollout.rows) >= 3)
    assert rollout.weights == [5]
    assert rollout.run().verdict is Verdict.BAKED
    assert [fact for fact in rollout.record.facts if isinstance(fact, Resumed)] == [Resumed()]


def test_every_reason_to_stop_beats_a_pause() -> None:
    def errors(bucket: int, _weight: int) -> float:
        return 0.2 if bucket >= 10 else 0.003

    last = paused_between(3, 10**6, Steady(errors=errors)).run()
    assert (last.verdict, last.reason, last.is_paused) == (Verdict.ROLLBACK, "error_rate", False)

    rollout = paused_between(1, 10**6)
    rollout.seen = lambda end: (
        DeploymentState("running", 1),
        DeploymentState("failed" if end > 4 else "running", 1),
    )
    assert rollout.run().reason == "candidate_failed"


@pytest.mark.parametrize("bake", [80, None])
def test_a_pause_in_a_bake_holds_what_would_end_it(bake: int | None) -> None:
    plan: dict[str, Any] = {"bake_weight": bake, "bake_looks": 3}
    free = paused_between(0, -1, **plan)
    free.run()
    ends = len(free.rows)
    rollout = paused_between(ends, ends + 5, **plan)
    assert rollout.run().verdict is Verdict.BAKED
    assert len(rollout.rows) == ends + 6
    held = rollout.record.looks[-2]
    assert (held.phase in (Phase.BAKE, Phase.SETTLE), held.reasons[0]) == (True, "paused")


def test_a_paused_rollout_is_replayed_from_its_lines_bit_by_bit() -> None:
    rollout = paused_between(5, 40, max_looks_per_step=8)
    rollout.run()
    record = from_lines(lines_of(rollout.record.facts))
    assert sum(look.is_paused for look in record.looks) == 36
    assert all(recorded == decided for recorded, decided in replay(record))
