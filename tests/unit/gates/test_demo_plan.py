"""How long a good rollout of the demo plan takes, and how soon a bad one ends (40 requests a second, 1 s buckets)."""

import statistics

import numpy as np
import pytest

from tests.unit.gates.rollouts import EDGES, Rollout, Served, plan_with
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Probed, Verdict


def demo_plan() -> CanaryPlan:
    return plan_with(
        steps=[10, 25, 50, 100],
        interval="1s",
        look_every_seconds=1,
        min_looks_per_step=5,
        min_requests_per_step=30,
        bake_weight=95,
        bake_looks=12,
        lease_seconds=30,
        latency_gates={"per_output_token": True},
        traffic={
            "prompts": "x",
            "requests_per_second": 40,
            "max_in_flight": 16,
            "max_tokens": 48,
        },
    )


class Drawn:
    """Independent requests with log-normal latency, sent to the candidate by chance, where each fails by chance."""

    def __init__(self, seed: int, candidate_errors: float) -> None:
        self.random = np.random.default_rng(seed)
        self.candidate_errors = candidate_errors

    def arm(self, requests: int, error_rate: float) -> Served:
        errors = int(self.random.binomial(requests, error_rate))
        latency = self.random.lognormal(np.log(120.0), 0.4, requests - errors)
        histogram = [int((latency <= (edge or np.inf)).sum()) for edge in EDGES]
        return Served(requests, errors, output=12.0 * (requests - errors), histogram=histogram)

    def __call__(self, bucket: int, weight: int) -> tuple[Served, Served]:
        candidate = int(self.random.binomial(40, weight / 100))
        return self.arm(40 - candidate, 0.0), self.arm(candidate, self.candidate_errors)


def counted(baseline: Served, candidate: Served) -> Probed:
    return Probed(candidate.requests, baseline.requests, candidate.errors, baseline.errors)


def seconds_to_the_end(
    candidate_errors: float, verdict: Verdict, runs: int, first: int = 0
) -> list[int]:
    seconds: list[int] = []
    for seed in range(first, first + runs):
        rollout = Rollout(
            demo_plan(), Drawn(seed, candidate_errors), probe=counted, looks_behind=1
        ).begin()
        assert rollout.run(most=300).verdict is verdict
        seconds.append(len(rollout.rows))
    return seconds


def test_equal_arms_are_promoted_and_baked_in_about_forty_seconds() -> None:
    assert 33 <= statistics.median(seconds_to_the_end(0.0, Verdict.BAKED, runs=5)) <= 56


def test_a_candidate_that_fails_a_fifth_of_its_requests_is_rolled_back_in_about_ten_seconds() -> (
    None
):
    assert 5 <= statistics.median(seconds_to_the_end(0.2, Verdict.ROLLBACK, runs=9)) <= 15


@pytest.mark.slow
@pytest.mark.soak
def test_nine_of_ten_demo_runs_keep_to_the_demo_s_time() -> None:
    good = sorted(seconds_to_the_end(0.0, Verdict.BAKED, runs=50, first=1000))
    bad = sorted(seconds_to_the_end(0.2, Verdict.ROLLBACK, runs=50, first=2000))
    assert good[25] <= 50
    assert good[45] <= 75
    assert bad[25] <= 12
    assert bad[45] <= 17
