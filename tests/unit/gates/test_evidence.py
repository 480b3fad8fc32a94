"""The statistics against independent computations: tables, 50-digit decimals, scipy, numpy, and what they promise."""

import math
from collections.abc import Sequence
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from tuneship.gates import evidence
from tuneship.gates.evidence import BucketCounts, Limits, Term

ERROR = Limits(ratio=1.5, harm=0.01, ok=0.02)
LOG_20 = math.log(20.0)


@st.composite
def buckets(draw: st.DrawFn, most: int = 12) -> list[BucketCounts]:
    def one() -> BucketCounts:
        n_c, n_b = draw(st.integers(0, 300)), draw(st.integers(0, 600))
        return BucketCounts(n_c, draw(st.integers(0, n_c)), n_b, draw(st.integers(0, n_b)))

    return [one() for _ in range(draw(st.integers(1, most)))]


limits = st.builds(
    Limits,
    ratio=st.floats(1.0, 4.0),
    harm=st.floats(0.001, 0.3),
    ok=st.floats(0.001, 0.3),
)


def harm_from(
    counts: Sequence[BucketCounts],
    gate: Limits,
    *,
    absolute_only: bool = False,
    charge_falls: bool = False,
) -> evidence.Harm:
    return evidence.harm(
        counts,
        gate,
        [Term(0, 1.0)],
        0.0,
        absolute_only=absolute_only,
        charge_falls=charge_falls,
    )


# Worked numbers of the design: clean requests that prove p_c below the margin, and requests that roll back.


@pytest.mark.parametrize(
    ("ok", "clean", "with_one", "with_two"),
    [
        (0.01, 467, 674, 867),
        (0.02, 232, 335, 432),
        (0.03, 154, 223, 287),
        (0.05, 92, 133, 171),
        (0.1, 45, 65, 84),
    ],
)
def test_the_absolute_half_alone_needs_the_tabled_number_of_requests(
    ok: float, clean: int, with_one: int, with_two: int
) -> None:
    def first_proven(bad: int) -> int:
        n = bad
        while True:
            logs = evidence._pass_logs((BucketCounts(n, bad),), Limits(1.5, 0.01, ok))[:9]
            if sum(map(math.exp, logs)) / 18 >= 10.0:
                return n
            n += 1

    assert [first_proven(0), first_proven(1), first_proven(2)] == [clean, with_one, with_two]


def test_three_failures_of_three_refute_the_margin_and_two_buckets_alone_do_not() -> None:
    failing = BucketCounts(1, 1)
    assert harm_from([failing] * 2, ERROR, absolute_only=True).log_u >= LOG_20
    assert harm_from([failing] * 2, ERROR, absolute_only=True).log_e < LOG_20
    assert harm_from([failing] * 3, ERROR, absolute_only=True).log_e >= LOG_20


def test_the_grid_runs_from_1_3_to_12_in_equal_ratios() -> None:
    assert len(evidence.GRID) == 12
    assert (evidence.GRID[0], evidence.GRID[-1]) == (1.3, pytest.approx(12.0))
    assert np.ptp(np.diff(np.log(evidence.GRID))) < 1e-12


def test_the_first_of_four_steps_weighs_58_percent_and_a_single_step_all() -> None:
    terms, idle = evidence.step_terms([0], 4)
    assert [term.weight for term in terms] == [0.58]
    assert idle == pytest.approx(0.42)
    assert evidence.step_terms([0], 1) == ([Term(0, 1.0)], 0.0)


def test_a_wait_keeps_its_newest_twelve_terms_and_never_weighs_more_than_one() -> None:
    terms, idle = evidence.wait_terms(range(0, 100, 5))
    assert [term.start for term in terms] == list(range(40, 100, 5))
    assert math.fsum(term.weight for term in terms) + idle < 1.0
    terms, idle = evidence.wait_terms([0, 5])
    assert math.fsum(term.weight for term in terms) + idle == pytest.approx(1.0)


def test_without_any_bucket_there_is_no_evidence_either_way() -> None:
    terms, idle = evidence.step_terms([0], 4)
    assert evidence.harm([], ERROR, terms, idle).log_e == pytest.approx(0.0)
    assert evidence.log_e_ok([], ERROR) == pytest.approx(0.0)
    assert evidence.early_z([], ERROR) is None


# An independent computation with 50 digits.


def decimal_values(
    counts: Sequence[BucketCounts], gate: Limits, *, charge_falls: bool
) -> tuple[Decimal, Decimal, Decimal]:
    """Return (min of the capped halves, min of the uncapped halves, E_ok) by the formulas as they are written."""
    getcontext().prec = 50
    d, r, ok = Decimal(gate.harm), Decimal(gate.ratio), Decimal(gate.ok)
    absolute, relative = [Decimal(1)] * 12, [Decimal(1)] * 12
    e = [Decimal(1), Decimal(1)]
    capped = [Decimal(1), Decimal(1)]
    pass_relative = [Decimal(1)] * 9
    for b in counts:
        for k, rho in enumerate(map(Decimal, evidence.GRID)):
            p = min(d * rho, Decimal("0.9"))
            absolute[k] *= (p / d) ** b.x_c * ((1 - p) / (1 - d)) ** (b.n_c - b.x_c)
            relative[k] *= decimal_ratio(b, r, rho)
        for k in range(9):
            pass_relative[k] *= decimal_ratio(b, r, Decimal(k + 1) / 10)
        for half, factors in enumerate((absolute, relative)):
            value = sum(factors) / 12
            change = min(value / e[half], Decimal(4))
            risen = min(value, capped[half] * max(change, Decimal(1)))
            capped[half] = capped[half] * change if charge_falls else risen
            e[half] = value
    n, x = sum(b.n_c for b in counts), sum(b.x_c for b in counts)
    ks = [Decimal(k) / 10 for k in range(1, 10)]
    pass_absolute = [k**x * ((1 - k * ok) / (1 - ok)) ** (n - x) for k in ks]
    return min(capped), min(e), (sum(pass_absolute) + sum(pass_relative)) / 18


def decimal_ratio(b: BucketCounts, r: Decimal, rho: Decimal) -> Decimal:
    if not (b.n_c and b.n_b):
        return Decimal(1)
    th0 = r * b.n_c / (r * b.n_c + b.n_b)
    th = r * rho * b.n_c / (r * rho * b.n_c + b.n_b)
    return (th / th0) ** b.x_c * ((1 - th) / (1 - th0)) ** b.x_b


@settings(max_examples=60, deadline=None)
@given(buckets(most=6), limits, st.booleans())
def test_all_values_equal_a_computation_with_fifty_digits(
    counts: list[BucketCounts], gate: Limits, charge_falls: bool
) -> None:
    capped, uncapped, ok = decimal_values(counts, gate, charge_falls=charge_falls)
    found = harm_from(counts, gate, charge_falls=charge_falls)
    assert found.log_e == pytest.approx(float(capped.ln()), rel=1e-9, abs=1e-8)
    assert found.log_u == pytest.approx(float(uncapped.ln()), rel=1e-9, abs=1e-8)
    assert evidence.log_e_ok(counts, gate) == pytest.approx(float(ok.ln()), rel=1e-9, abs=1e-8)


def test_evidence_beyond_the_largest_float_stays_a_number() -> None:
    found = harm_from([BucketCounts(10**6, 10**6, 10**6, 0)], ERROR)
    assert 1e5 < found.log_u < math.inf
    assert evidence.log_e_ok([BucketCounts(10**9, 0, 10**9, 10**7)], ERROR) < math.inf


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.data())
def test_a_single_factor_is_the_likelihood_ratio_of_scipy(n: int, data: st.DataObject) -> None:
    x = data.draw(st.integers(0, n))
    factor = evidence._absolute_factor(BucketCounts(n, x), 0.02)
    assert factor is not None
    rates = np.minimum(0.02 * np.array(evidence.GRID), 0.9)
    expected = stats.binom.logpmf(x, n, rates) - stats.binom.logpmf(x, n, 0.02)
    assert np.allclose(factor, expected, rtol=1e-7, atol=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_the_relative_half_is_the_conditional_binomial_of_scipy(
    n_c: int, n_b: int, data: st.DataObject
) -> None:
    b = BucketCounts(n_c, data.draw(st.integers(0, n_c)), n_b, data.draw(st.integers(0, n_b)))
    found = evidence._relative_factor(b, 1.5, "harm")
    assert (found is None) == (not b.x_c + b.x_b)
    if found is None:
        return
    grid = 1.5 * np.array(evidence.GRID) * n_c
    th, th0 = grid / (grid + n_b), 1.5 * n_c / (1.5 * n_c + n_b)
    m = b.x_c + b.x_b
    expected = stats.binom.logpmf(b.x_c, m, th) - stats.binom.logpmf(b.x_c, m, th0)
    assert np.allclose(found, expected, rtol=1e-7, atol=1e-7)


# Changes of the input that must not change the evidence.


@settings(max_examples=60, deadline=None)
@given(buckets(most=6), limits, st.integers(2, 5))
def test_splitting_a_bucket_at_the_same_ratio_changes_no_uncapped_value(
    counts: list[BucketCounts], gate: Limits, parts: int
) -> None:
    whole = [BucketCounts(b.n_c * parts, b.x_c, b.n_b * parts, b.x_b) for b in counts]
    split: list[BucketCounts] = []
    for b in counts:
        pieces = [BucketCounts(b.n_c, 0, b.n_b, 0)] * (parts - 1)
        split += [BucketCounts(b.n_c, b.x_c, b.n_b, b.x_b), *pieces]
    assert harm_from(whole, gate).log_u == pytest.approx(
        harm_from(split, gate).log_u, rel=1e-9, abs=1e-7
    )
    assert evidence.log_e_ok(whole, gate) == pytest.approx(
        evidence.log_e_ok(split, gate), rel=1e-9, abs=1e-7
    )


@given(buckets(), limits, st.integers(0, 12))
def test_an_empty_bucket_changes_nothing(
    counts: list[BucketCounts], gate: Limits, place: int
) -> None:
    padded = [*counts[:place], BucketCounts(0, 0), *counts[place:]]
    assert harm_from(padded, gate) == harm_from(counts, gate)
    assert evidence.log_e_ok(padded, gate) == evidence.log_e_ok(counts, gate)
    assert evidence.early_z(padded, gate) == evidence.early_z(counts, gate)


@given(buckets(), limits, st.lists(st.integers(0, 12), max_size=4, unique=True))
def test_remembering_earlier_looks_changes_no_number(
    counts: list[BucketCounts], gate: Limits, starts: list[int]
) -> None:
    terms, idle = evidence.step_terms(sorted(starts), 4)
    looks = [evidence.harm(counts[:seen], gate, terms, idle) for seen in range(1, len(counts) + 1)]
    evidence._walks.clear()
    assert evidence.harm(counts, gate, terms, idle) == looks[-1]


@given(buckets(), limits)
def test_the_cap_only_lowers_evidence(counts: list[BucketCounts], gate: Limits) -> None:
    """As it does so at every bucket, false rollbacks are limited as they are without the cap."""
    for seen in range(1, len(counts) + 1):
        found, first = (
            harm_from(counts[:seen], gate, charge_falls=charge_falls)
            for charge_falls in (False, True)
        )
        assert first.log_e - 1e-9 <= found.log_e <= found.log_u + 1e-9


def test_a_fall_uses_up_what_the_cap_cut_off_before_it_lowers_the_evidence() -> None:
    bad, good = BucketCounts(75, 7), BucketCounts(75, 0)
    once = harm_from([bad], ERROR, absolute_only=True)
    assert once.log_e == pytest.approx(math.log(4.0))
    after = harm_from([bad, good], ERROR, absolute_only=True)
    assert after.log_u < once.log_u
    assert after.log_e == once.log_e
    assert harm_from([bad, good], ERROR, absolute_only=True, charge_falls=True).log_e < once.log_e
    long = harm_from([bad, *[good] * 8], ERROR, absolute_only=True)
    assert long.log_e == long.log_u < 0.0


def test_one_burst_multiplies_the_evidence_by_four_at_most() -> None:
    assert harm_from([BucketCounts(30, 30, 570, 2)], ERROR).log_e == pytest.approx(math.log(4.0))


def test_the_warning_stays_on_until_evidence_falls_below_two() -> None:
    rising = [BucketCounts(10, 1, 90, 0)] * 4
    on = harm_from(rising, ERROR, absolute_only=True)
    assert on.warned
    assert on.log_e >= math.log(5.0)
    between = harm_from([*rising, BucketCounts(100, 0)], ERROR, absolute_only=True)
    assert between.warned
    assert math.log(2.0) <= between.log_e < math.log(5.0)
    assert not harm_from([*rising, BucketCounts(600, 0)], ERROR, absolute_only=True).warned


def test_two_bad_answers_never_warn_by_z() -> None:
    assert not evidence.early_warning([BucketCounts(10, 2, 1000, 0)], ERROR)
    assert evidence.early_warning([BucketCounts(10, 3, 1000, 0)], ERROR)


def test_pooling_steps_of_different_weight_does_not_warn() -> None:
    """A shared incident while the candidate had 5 %, then health at 75 %: each bucket is compared with itself."""
    shared = [BucketCounts(30, 3, 570, 57)] * 5 + [BucketCounts(450, 2, 150, 1)] * 5
    assert not evidence.early_warning(shared, ERROR)


# Forecast.


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2), st.integers(0, 20))
def test_the_requests_to_proof_are_enough_and_one_less_is_not(n: int, x: int, x_b: int) -> None:
    counts = [BucketCounts(n, min(x, n), 3 * n, min(x_b, 3 * n))]
    needed = evidence.requests_to_proof(counts, ERROR)
    logs = np.array(evidence._pass_logs(tuple(counts), ERROR))
    if needed is None:
        assert max(logs) <= 1e-12
        return

    def log_e_after(more: int) -> float:
        return float(logsumexp(logs * (n + more) / n)) - math.log(len(logs))

    assert log_e_after(needed) >= evidence.LOG_PROVEN - 1e-9
    if needed:
        assert log_e_after(needed - 1) < evidence.LOG_PROVEN + 1e-9


def test_a_rate_on_the_margin_is_never_called_provable() -> None:
    assert (
        evidence.requests_to_proof([BucketCounts(1000, 20, 1000, 10)], Limits(1.5, 0.01, 0.01))
        is None
    )


# The promise of at most 5 % false rollbacks, however often one looks, by an independent vectorised implementation.


def log_harm_paths(
    n_c: np.ndarray, x_c: np.ndarray, n_b: np.ndarray, x_b: np.ndarray, starts: list[int]
) -> np.ndarray:
    """Return log E_harm after each bucket, capped, for many paths at once (rows: paths, columns: buckets)."""
    r, d = ERROR.ratio, ERROR.harm
    rho = np.geomspace(1.3, 12, 12)[:, None, None]
    p = np.minimum(d * rho, 0.9)
    absolute = x_c * np.log(p / d) + (n_c - x_c) * np.log((1 - p) / (1 - d))
    th, th0 = r * rho * n_c / (r * rho * n_c + n_b), r * n_c / (r * n_c + n_b)
    relative = x_c * np.log(th / th0) + x_b * np.log((1 - th) / (1 - th0))
    weights = [0.58, 0.14, 0.14, 0.14]
    total = np.full(x_c.shape, -np.inf)
    for start, weight in zip(starts, weights, strict=True):
        halves: list[np.ndarray] = []
        for factors in (absolute, relative):
            sums = np.cumsum(factors[:, :, start:], axis=2)
            log_e = np.logaddexp.reduce(sums, axis=0) - np.log(12)
            rises = np.clip(np.diff(log_e, axis=1, prepend=0.0), 0.0, np.log(4))
            capped = np.zeros_like(log_e)
            for i in range(log_e.shape[1]):
                before = capped[:, i - 1] if i else 0.0
                capped[:, i] = np.minimum(log_e[:, i], before + rises[:, i])
            halves.append(capped)
        term = np.concatenate([np.zeros((x_c.shape[0], start)), np.minimum(*halves)], axis=1)
        total = np.logaddexp(total, np.log(weight) + term)
    return total


def margin_paths(seed: int, paths: int, shared: np.ndarray, rate: int) -> tuple[np.ndarray, ...]:
    """Draw counts with the candidate exactly on the relative margin of a shared error rate per bucket."""
    random = np.random.default_rng(seed)
    weight = np.repeat([0.05, 0.25, 0.5, 0.75], 5)
    n_c = np.round(rate * weight)[None, :].repeat(paths, 0)
    n_b = rate - n_c
    x_b = random.binomial(n_b.astype(int), shared)
    x_c = random.binomial(n_c.astype(int), np.maximum(1.5 * shared, 0.01))
    return n_c, x_c, n_b, x_b


NULLS = {
    "half a percent": np.full(20, 0.005),
    "two percent, candidate three": np.full(20, 0.02),
    "shared incident of ten percent": np.where(np.arange(20) // 3 == 3, 0.10, 0.005),
    "slow wave": 0.02 + 0.015 * np.sin(np.arange(20) / 3),
}


@pytest.mark.parametrize("shared", NULLS.values(), ids=NULLS.keys())
def test_at_most_five_percent_of_two_thousand_null_paths_ever_reach_twenty(
    shared: np.ndarray,
) -> None:
    n_c, x_c, n_b, x_b = margin_paths(7001, 2000, shared, 300)
    logs = log_harm_paths(n_c, x_c, n_b, x_b, [0, 5, 10, 15])
    assert (logs.max(axis=1) >= LOG_20).mean() <= 0.05


def test_the_vectorised_paths_are_what_the_gates_compute() -> None:
    columns = margin_paths(7002, 40, NULLS["slow wave"] * 3, 300)
    logs = log_harm_paths(*columns, [0, 5, 10, 15])
    for path in range(40):
        counts = [
            BucketCounts(*map(int, cell))
            for cell in zip(*(column[path] for column in columns), strict=True)
        ]
        for seen in (1, 6, 13, 20):
            begun = [start for start in (0, 5, 10, 15) if start < seen]
            terms, idle = evidence.step_terms(begun, 4)
            found = evidence.harm(counts[:seen], ERROR, terms, idle).log_e
            assert found == pytest.approx(logs[path, seen - 1], rel=1e-9, abs=1e-9)


def test_a_candidate_on_the_pass_margin_is_seldom_proven_at_look_twenty() -> None:
    random = np.random.default_rng(7003)
    proven = 0
    for _ in range(400):
        counts = [
            BucketCounts(
                n, int(random.binomial(n, 0.02)), 300 - n, int(random.binomial(300 - n, 0.0133))
            )
            for n in np.repeat([15, 75, 150, 225], 5).tolist()
        ]
        proven += evidence.log_e_ok(counts, ERROR) >= evidence.LOG_PROVEN
    assert proven / 400 <= 0.10
