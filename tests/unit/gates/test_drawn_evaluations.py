"""An equal candidate is seldom rejected and a worse one nearly always, on evaluations drawn from seeds.

`make test` has a few runs, `make test-all` 120 a cell, `make soak` 2,000.
`python -m tests.unit.gates.drawn_evaluations` prints the table.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.unit.gates.drawn_evaluations.clusters import CLUSTER_KINDS, ClusterKind, wrong_ends
from tests.unit.gates.drawn_evaluations.kinds import KINDS, NOT_WORSE, SIZES, ends, judged
from tuneship.gates.evaluation.paired import PairedCounts, p_mcnemar

# Kind, examples, margin, verdict, and the least and the largest share of it.
BOUNDS = [
    *((name, n, margin, "reject", 0.0, 0.05) for name in NOT_WORSE for n, margin in SIZES),
    ("5 points worse", 1000, 0.03, "reject", 0.93, 1.0),
    ("10 points worse", 500, 0.05, "reject", 0.97, 1.0),
    ("equal, a slice of 11.4 % loses 30", 1000, 0.03, "reject", 0.97, 1.0),
    ("equal, a slice of 11.4 % loses 30", 2000, 0.02, "reject", 0.97, 1.0),
    # They pass as seldom as the test says; the normal approximation is off by some tenths of a percent.
    ("3 points worse", 1000, 0.03, "pass", 0.0, 0.055),
    ("3 points worse", 5000, 0.03, "pass", 0.0, 0.055),
    ("2 points worse", 2000, 0.02, "pass", 0.0, 0.055),
    ("5 points worse", 500, 0.05, "pass", 0.0, 0.055),
    ("equal, 10 % differ", 1000, 0.03, "pass", 0.85, 1.0),
]
Bound = tuple[str, int, float, str, float, float]
EACH = pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: f"{b[0]}-{b[1]}-{b[2]}-{b[3]}")


def assert_within(bound: Bound, seeds: Sequence[int]) -> None:
    """Assert that the share of a verdict is within its bounds, allowing for chance."""
    name, n, margin, verdict, least, most = bound
    share = ends(KINDS[name], n, margin, seeds).shares[verdict]
    for limit, excess in ((most, share - most), (least, least - share)):
        assert excess <= 3.0 * math.sqrt(limit * (1.0 - limit) / len(seeds)), share


@pytest.mark.parametrize(
    "bound", [b for b in BOUNDS if b[1] == 1000], ids=lambda b: f"{b[0]}-{b[3]}"
)
def test_a_few_evaluations_of_the_usual_size_end_as_they_must(bound: Bound) -> None:
    assert_within(bound, range(20))


@pytest.mark.slow
@EACH
def test_120_evaluations_of_every_kind_end_as_they_must(bound: Bound) -> None:
    assert_within(bound, range(1000, 1120))


@pytest.mark.slow
@pytest.mark.soak
@EACH
def test_two_thousand_evaluations_of_every_kind_end_as_they_must(bound: Bound) -> None:
    assert_within(bound, range(10_000, 12_000))


def assert_seldom_wrong(kind: ClusterKind, seeds: Sequence[int]) -> None:
    """Assert that the test by clusters is wrong as seldom as an approximation is, allowing for chance."""
    found = wrong_ends(kind, seeds)
    for share, most in ((found.passed, 0.09), (found.worse, 0.03)):
        assert share <= most + 3.0 * math.sqrt(most * (1.0 - most) / len(seeds)), found


@pytest.mark.parametrize("kind", CLUSTER_KINDS, ids=str)
def test_by_clusters_few_candidates_are_judged_wrong(kind: ClusterKind) -> None:
    assert_seldom_wrong(kind, range(100))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", CLUSTER_KINDS, ids=str)
def test_by_clusters_hardly_one_of_ten_candidates_is_judged_wrong(kind: ClusterKind) -> None:
    assert_seldom_wrong(kind, range(10_000, 12_000))


def test_student_alone_would_pass_a_fifth_of_the_candidates_on_the_margin() -> None:
    assert wrong_ends(CLUSTER_KINDS[0], range(300)).passed_by_t > 0.15


def test_an_exact_test_at_every_look_would_reject_a_fifth_of_the_equal_models() -> None:
    rejected = 0
    for seed in range(100):
        _, outcomes = KINDS["equal, 16 % differ"].draw(2000, seed)
        wins, losses = np.cumsum(outcomes[0] == 1), np.cumsum(outcomes[0] == -1)
        looks = [PairedCounts(n, int(wins[n - 1]), int(losses[n - 1])) for n in range(25, 2001, 25)]
        rejected += any(p_mcnemar(one) <= 0.05 for one in looks)
    assert 10 <= rejected <= 40


def test_significance_alone_would_reject_half_of_what_the_margin_allows() -> None:
    worse = 0
    for seed in range(100):
        _, outcomes = KINDS["1 point worse"].draw(5000, seed)
        wins, losses = int((outcomes == 1).sum()), int((outcomes == -1).sum())
        worse += p_mcnemar(PairedCounts(5000, wins, losses)) <= 0.02
    assert 35 <= worse <= 70


def test_every_kind_draws_the_same_examples_from_the_same_seed() -> None:
    for kind in KINDS.values():
        assert judged(kind, 500, 0.03, 3) == judged(kind, 500, 0.03, 3)
