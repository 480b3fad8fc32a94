"""A rollout that waits a day for a person takes a thousand looks, so each must stay cheap."""

import cProfile
import pstats

from tests.unit.gates.rollouts import Rollout, Steady, plan_with
from tuneship.gates.record import Phase


def _calls_of_a_look_after(looks: int) -> int:
    rollout = Rollout(plan_with(approval="required"), Steady()).begin()
    for _ in range(looks):
        rollout.look()
    assert rollout.record.phase is Phase.WAIT
    with cProfile.Profile() as profile:
        rollout.look()
    return pstats.Stats(profile).total_calls


def test_the_work_of_a_look_does_not_grow_with_the_square_of_the_looks_before_it() -> None:
    assert _calls_of_a_look_after(120) < 2.1 * _calls_of_a_look_after(60)
