"""The training gates pass the jobs that must pass and refuse those that must not, on jobs drawn from seeds.

`make test` has a few runs of every kind, `make test-all` 60, `make soak` 1,000.
`python -m tests.unit.gates.drawn_jobs` prints the table.
"""

import math
from collections.abc import Sequence

import pytest

from tests.unit.gates.drawn_jobs.kinds import KINDS, JobKind, share_wrong, shares

EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def assert_within_bounds(kind: JobKind, seeds: Sequence[int]) -> None:
    """Assert that wrong ends and holds are no more frequent than the bounds of this kind allow."""
    ends = shares(kind.after, seeds)
    # A hold refuses too where nobody is asked, so it is wrong only of a job that must pass.
    holds = ends["hold"] if kind.must == "pass" else 0.0
    for share, most in ((share_wrong(kind, ends), kind.most), (holds, kind.most_holds)):
        assert share <= most + 3.0 * math.sqrt(most * (1.0 - most) / len(seeds)), ends


@EACH
def test_a_few_jobs_of_every_kind_end_as_they_must(kind: JobKind) -> None:
    assert_within_bounds(kind, range(6))


@pytest.mark.slow
@EACH
def test_sixty_jobs_of_every_kind_end_as_they_must(kind: JobKind) -> None:
    assert_within_bounds(kind, range(1000, 1060))


@pytest.mark.slow
@pytest.mark.soak
@EACH
def test_a_thousand_jobs_of_every_kind_end_as_they_must(kind: JobKind) -> None:
    assert_within_bounds(kind, range(10_000, 11_000))


def test_every_kind_draws_the_same_job_from_the_same_seed() -> None:
    for kind in KINDS.values():
        assert kind.after(3) == kind.after(3)
