"""The gates promote what must be promoted and stop what must be stopped, on requests that are drawn one by one.

`make test` has a handful of rows, `make test-all` 5, 10 or 20 runs of each (`Kind.runs`), `make soak` 200.
`python -m tests.unit.gates.drawn` prints all.
"""

import math
from collections.abc import Sequence

import pytest

from tests.unit.gates.drawn import (
    KINDS,
    Kind,
    Run,
    argo,
    kayenta,
    roll_out,
    runs_of,
    share_wrong,
    watched,
)

BOUNDED = [kind for kind in KINDS.values() if kind.most is not None]
EACH = pytest.mark.parametrize("kind", BOUNDED, ids=[kind.name for kind in BOUNDED])
A_HANDFUL = (
    "equal",
    "answers of one length: 4 % slower",
    "5 % errors",
    "answers of one length: 1.4 x slower",
    "30 % are a full stop",
)


def assert_within_bounds(kind: Kind, runs: Sequence[Run]) -> None:
    """Assert that wrong ends, inconclusive ones included, are no more frequent and stops no later than allowed."""
    most = kind.most or 0.0
    assert share_wrong(kind, runs) <= most + 2.0 * math.sqrt(most * (1.0 - most) / len(runs))
    if kind.by is not None:
        in_time = sum(run.looks <= kind.by for run in runs) / len(runs)
        assert in_time >= 0.5 - 2.0 * math.sqrt(0.25 / len(runs)), "the median run ends later"


@pytest.mark.parametrize("name", A_HANDFUL)
def test_a_run_of_a_handful_of_kinds_ends_as_it_must(name: str) -> None:
    runs = runs_of(KINDS[name], range(1))
    assert share_wrong(KINDS[name], runs) == 0.0, runs


# `make soak` draws more of all of them.
@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDED[::5], ids=[kind.name for kind in BOUNDED[::5]])
def test_a_few_runs_of_every_fifth_kind_end_as_they_must(kind: Kind) -> None:
    assert_within_bounds(kind, runs_of(kind, range(1000, 1000 + kind.runs)))


@pytest.mark.slow
@pytest.mark.soak
@EACH
def test_two_hundred_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    assert_within_bounds(kind, runs_of(kind, range(10_000, 10_200)))


def test_the_rivals_see_gross_errors_and_equal_arms() -> None:
    bad, equal = watched(KINDS["5 % errors"], 1), watched(KINDS["equal"], 1)
    assert not argo(*bad, failure_limit=0).is_promoted
    assert not kayenta(bad[1]).is_promoted
    assert argo(*equal, failure_limit=3).is_promoted
    assert kayenta(equal[1]).is_promoted


def test_every_kind_draws_the_same_requests_from_the_same_seed() -> None:
    kind = KINDS["equal"]
    assert roll_out(kind, 7) == roll_out(kind, 7)
