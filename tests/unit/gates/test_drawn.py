"""The gates promote what must be promoted and stop what must be stopped, on requests that are drawn one by one.

`make test` has a few runs of every kind, `make test-all` has six, `make soak` 1,000.
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
LIVE_BAKE = {"bake_weight": 95}


def assert_within_bounds(kind: Kind, runs: Sequence[Run]) -> None:
    """Assert that wrong ends are no more frequent, and stops no later, than the bounds of this kind allow."""
    most = kind.most or 0.0
    assert share_wrong(kind, runs) <= most + 2.0 * math.sqrt(most * (1.0 - most) / len(runs))
    if kind.by is not None:
        in_time = sum(run.looks <= kind.by for run in runs) / len(runs)
        assert in_time >= 0.5 - 2.0 * math.sqrt(0.25 / len(runs)), "the median run ends later"


@EACH
def test_a_few_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    runs = runs_of(kind, range(2), **LIVE_BAKE)
    assert share_wrong(kind, runs) == 0.0, runs


def test_flapping_errors_are_stopped_by_minute_twelve() -> None:
    kind = KINDS["flapping: 8 % errors every second minute v 0.3 %"]
    assert kind.by == 12
    assert_within_bounds(kind, runs_of(kind, range(20), **LIVE_BAKE))


@pytest.mark.slow
@EACH
def test_half_a_dozen_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    assert_within_bounds(kind, runs_of(kind, range(1000, 1006), **LIVE_BAKE))


@pytest.mark.slow
@pytest.mark.soak
@EACH
def test_a_thousand_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    assert_within_bounds(kind, runs_of(kind, range(10_000, 11_000), **LIVE_BAKE))


def test_formula_1_promoted_those_whose_callers_disconnect() -> None:
    """A rollout on which callers disconnect shows why the counts of callers are needed."""
    kind = KINDS["30 % hang, callers wait 10 s"]
    assert roll_out(kind, 1, before=True).is_promoted
    assert not roll_out(kind, 1).is_promoted


def test_the_rivals_see_gross_errors_and_equal_arms() -> None:
    bad, equal = watched(KINDS["5 % errors"], 1), watched(KINDS["equal"], 1)
    assert not argo(*bad, failure_limit=0).is_promoted
    assert not kayenta(bad[1]).is_promoted
    assert argo(*equal, failure_limit=3).is_promoted
    assert kayenta(equal[1]).is_promoted


def test_every_kind_draws_the_same_requests_from_the_same_seed() -> None:
    kind = KINDS["equal"]
    assert roll_out(kind, 7) == roll_out(kind, 7)
