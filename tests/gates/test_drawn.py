"""The gates on requests drawn one by one: what must be promoted is, what must be stopped is.

A few runs of every kind in `make test`, 60 and 1,000 in `make soak`; `python -m tests.gates.drawn` prints all.
"""

import math

import pytest

from tests.gates.drawn import KINDS, Kind, argo, kayenta, roll_out, runs_of, share_wrong

BOUNDED = [kind for kind in KINDS.values() if kind.most is not None]
EACH = pytest.mark.parametrize("kind", BOUNDED, ids=[kind.name for kind in BOUNDED])
LIVE_BAKE = {"bake_weight": 95}


def at_most(kind: Kind, runs: int) -> float:
    """The share of wrong ends that still agrees with the bound of this kind."""
    most = kind.most or 0.0
    return most + 2.0 * math.sqrt(most * (1.0 - most) / runs)


@EACH
def test_a_few_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    runs = runs_of(kind, range(2), **LIVE_BAKE)
    assert share_wrong(kind, runs) == 0.0, runs


@pytest.mark.slow
@pytest.mark.soak
@EACH
def test_sixty_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    runs = runs_of(kind, range(1000, 1060), **LIVE_BAKE)
    assert share_wrong(kind, runs) <= at_most(kind, 60)


@pytest.mark.slow
@pytest.mark.soak
@EACH
def test_a_thousand_runs_of_every_kind_end_as_they_must(kind: Kind) -> None:
    runs = runs_of(kind, range(10_000, 11_000), **LIVE_BAKE)
    assert share_wrong(kind, runs) <= at_most(kind, 1000)


def test_formula_1_promoted_those_whose_callers_hang_up() -> None:
    """What the counts of callers are for."""
    kind = KINDS["30 % hang, callers wait 10 s"]
    assert roll_out(kind, 1, before=True).is_promoted
    assert not roll_out(kind, 1).is_promoted


def test_the_rivals_see_gross_errors_and_equal_arms() -> None:
    bad, equal = KINDS["5 % errors"], KINDS["equal"]
    assert not argo(bad, 1, 0).is_promoted
    assert not kayenta(bad, 1).is_promoted
    assert argo(equal, 1, 3).is_promoted
    assert kayenta(equal, 1).is_promoted


def test_every_kind_draws_the_same_requests_from_the_same_seed() -> None:
    kind = KINDS["equal"]
    assert roll_out(kind, 7) == roll_out(kind, 7)
