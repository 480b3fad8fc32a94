"""An equal candidate is seldom rejected and a worse one nearly always, on evaluations drawn from seeds.

`make test` has a few runs, `make test-all` 120 a cell, `make soak` 2,000.
`python -m tests.unit.gates.drawn_evaluations` prints the table.
"""

import math
from collections.abc import Sequence

import pytest

from tests.unit.gates.drawn_evaluations.kinds import KINDS, NOT_WORSE, SIZES, ends, judged

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


def test_every_kind_draws_the_same_examples_from_the_same_seed() -> None:
    for kind in KINDS.values():
        assert judged(kind, 500, 0.03, 3) == judged(kind, 500, 0.03, 3)
