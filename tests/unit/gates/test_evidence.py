"""The statistics against independent computations: tables, 50-digit decimals, scipy, numpy, and what they promise."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal, getcontext
from functools import reduce
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from tuneship.gates.rules import is_crash
from tuneship.gates.statistics import evidence, fold
from tuneship.gates.statistics.evidence import BucketCounts, Limits, Terms
from tuneship.gates.statistics.gate_limits import CrashRule, TypicalGate

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
) -> evidence.Harm:
    return evidence.harm(counts, gate, Terms((0,), (1.0,), 0.0), absolute_only=absolute_only)


def ln_ok(counts: Sequence[BucketCounts], gate: Limits) -> float:
    return evidence.proof(counts, gate).log_e


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
            logs = evidence._pass_logs(BucketCounts(n, bad), Limits(1.5, 0.01, ok))[:9]
            if sum(map(math.exp, logs)) / 18 >= 10.0:
                return n
            n += 1

    assert [first_proven(0), first_proven(1), first_proven(2)] == [clean, with_one, with_two]


def test_three_failures_of_three_refute_the_margin_and_two_buckets_alone_do_not() -> None:
    failing = BucketCounts(1, 1)
    assert harm_from([failing] * 2, ERROR, absolute_only=True).log_fast >= LOG_20
    assert harm_from([failing] * 2, ERROR, absolute_only=True).log_e < LOG_20
    assert harm_from([failing] * 3, ERROR, absolute_only=True).log_e >= LOG_20


def test_the_grid_runs_from_1_3_to_12_in_equal_ratios() -> None:
    assert len(evidence.GRID) == 12
    assert (evidence.GRID[0], evidence.GRID[-1]) == (1.3, pytest.approx(12.0))
    assert np.ptp(np.diff(np.log(evidence.GRID))) < 1e-12


def test_the_first_of_four_steps_weighs_58_percent_and_a_single_step_all() -> None:
    terms = evidence.step_terms([0], 4)
    assert terms.weights == (0.58,)
    assert terms.idle == pytest.approx(0.42)
    assert evidence.step_terms([0], 1) == Terms((0,), (1.0,), 0.0)


def test_a_wait_keeps_its_newest_twelve_terms_and_never_weighs_more_than_one() -> None:
    terms = evidence.wait_terms(range(0, 100, 5))
    assert terms.kept == 12
    assert math.fsum(terms.weights) + terms.idle == pytest.approx(1.0)
    fine = [BucketCounts(100, 0, 100, 0)] * 100
    newest = Terms(terms.starts[-12:], terms.weights[-12:], terms.idle)
    assert evidence.harm(fine, ERROR, terms) == evidence.harm(fine, ERROR, newest)


def test_without_any_bucket_there_is_no_evidence_either_way() -> None:
    assert evidence.harm([], ERROR, evidence.step_terms([0], 4)).log_e == pytest.approx(0.0)
    assert ln_ok([], ERROR) == pytest.approx(0.0)
    assert evidence.early_z([], ERROR) is None


# An independent computation with 50 digits.


def decimal_values(
    counts: Sequence[BucketCounts], gate: Limits
) -> tuple[Decimal, Decimal, Decimal]:
    """Return (the smallest capped half, the smallest half of the fast tier, the proof) by the formulas as written."""
    getcontext().prec = 50
    d, r, ok = (Decimal(value or 0.0) for value in (gate.harm, gate.ratio, gate.ok))
    harm = [[Decimal(1)] * 12 for _ in range(3)]
    caps = Decimal(4), Decimal(10) ** Decimal("3.5")
    e, capped = [Decimal(1)] * 3, [[Decimal(1)] * 3 for _ in caps]
    passes: list[list[Decimal]] = []
    for b in counts:
        wider = b._replace(x_c=b.w_c)
        for k, rho in enumerate(map(Decimal, evidence.GRID)):
            p = min(d * rho, Decimal("0.9"))
            harm[0][k] *= (p / d) ** b.x_c * ((1 - p) / (1 - d)) ** (b.n_c - b.x_c)
            harm[1][k] *= decimal_ratio(b, r, rho)
            harm[2][k] *= decimal_ratio(wider, Decimal(1), rho)
        ks = [Decimal(k) / 10 for k in range(1, 10)]
        passes.append(
            [k**b.x_c * ((1 - k * ok) / (1 - ok)) ** (b.n_c - b.x_c) for k in ks]
            + [decimal_ratio(b, r, k) for k in ks]
            + [decimal_ratio(b._replace(x_c=b.v_c), Decimal(1), k) for k in ks]
        )
        for half, factors in enumerate(harm):
            value = sum(factors) / 12
            for cap, found in zip(caps, capped, strict=True):
                rise = max(min(value / e[half], cap), Decimal(1))
                found[half] = min(value, found[half] * rise)
            e[half] = value
    by_bucket = [sum(one) / 27 for one in passes]
    proof = sum(
        Decimal(weight) * part
        for weight, part in (
            ("0.6", sum(map(decimal_product, zip(*passes, strict=True))) / 27),
            ("0.2", decimal_product(by_bucket)),
            ("0.2", sum(map(decimal_product, zip(*passes[-20:], strict=True))) / 27),
        )
    )
    newest = sum(map(decimal_product, zip(*passes[-20:], strict=True))) / 27
    return min(capped[0]), min(capped[1]), min(Decimal(proof), newest * 100)


def decimal_product(values: Iterable[Decimal]) -> Decimal:
    return reduce(Decimal.__mul__, values, Decimal(1))


def decimal_ratio(b: BucketCounts, r: Decimal, rho: Decimal) -> Decimal:
    if not (b.n_c and b.n_b):
        return Decimal(1)
    th0 = r * b.n_c / (r * b.n_c + b.n_b)
    th = r * rho * b.n_c / (r * rho * b.n_c + b.n_b)
    return (th / th0) ** b.x_c * ((1 - th) / (1 - th0)) ** b.x_b


@settings(max_examples=60, deadline=None)
@given(buckets(most=6), limits)
def test_all_values_equal_a_computation_with_fifty_digits(
    counts: list[BucketCounts], gate: Limits
) -> None:
    gate = replace(gate, farther=(5, 8))
    counts = [b._replace(w_c=b.x_c // 2, v_c=b.x_c // 3) for b in counts]
    capped, fast, ok = decimal_values(counts, gate)
    found = harm_from(counts, gate)
    assert found.log_e == pytest.approx(float(capped.ln()), rel=1e-9, abs=1e-8)
    assert found.log_fast == pytest.approx(float(fast.ln()), rel=1e-9, abs=1e-8)
    assert ln_ok(counts, gate) == pytest.approx(float(ok.ln()), rel=1e-9, abs=1e-8)


# Why the limits hold, by summing over all outcomes.


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
@pytest.mark.parametrize(("n_c", "n_b"), [(1, 1), (2, 6), (6, 2), (4, 4), (6, 6)])
def test_no_factor_has_a_mean_above_one_for_a_candidate_within_its_margin(
    n_c: int, n_b: int, ratio: float
) -> None:
    """With ratio 1 the two limits may differ: the factor asks for nothing but p_c <= p_b."""
    shares = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)
    for p_b in shares:
        for p_c in {min(ratio * p_b, 1.0), *(p for p in shares if p <= ratio * p_b)}:
            assert mean_of_factors(n_c, p_c, n_b, p_b, ratio, "harm").max() <= 1 + 1e-12
        for p_c in (p for p in {ratio * p_b, *shares} if ratio * p_b <= p <= 1.0):
            assert mean_of_factors(n_c, p_c, n_b, p_b, ratio, "pass").max() <= 1 + 1e-12


def mean_of_factors(
    n_c: int, p_c: float, n_b: int, p_b: float, ratio: float, side: Literal["harm", "pass"]
) -> np.ndarray:
    means = np.zeros(12 if side == "harm" else 9)
    for x_c in range(n_c + 1):
        for x_b in range(n_b + 1):
            logs = evidence._relative_factor(n_c, x_c, n_b, x_b, ratio, side)
            chance = stats.binom.pmf(x_c, n_c, p_c) * stats.binom.pmf(x_b, n_b, p_b)
            means += chance * (np.exp(logs) if logs is not None else 1.0)
    return means


def test_the_fast_tier_never_decides_in_one_bucket_and_may_in_two() -> None:
    all_fail = BucketCounts(10**5, 10**5, 10**5, 0)
    for gate in (ERROR, replace(ERROR, farther=(5, 8))):
        one = harm_from([all_fail._replace(w_c=10**5)], gate)
        two = harm_from([all_fail._replace(w_c=10**5)] * 2, gate)
        assert one.log_fast < evidence.LOG_FAST_TIER <= two.log_fast


def test_equal_arms_in_a_shared_incident_meet_the_crash_rule_in_one_of_a_thousand_at_most() -> None:
    random = np.random.default_rng(11)
    for share in (0.25, 0.4, 0.6):
        for n_c, n_b in ((75, 225), (225, 75), (240, 60), (2250, 750)):
            drawn = random.binomial([n_c, n_b], share, size=(1000, 2)).tolist()
            met = sum(is_crash(BucketCounts(n_c, c, n_b, b), CrashRule()) for c, b in drawn)
            assert met <= 1


def test_the_crash_rule_needs_a_baseline_that_is_well_and_many_failures() -> None:
    crash = BucketCounts(75, 30, 225, 2)
    assert is_crash(crash, CrashRule())
    assert not is_crash(crash._replace(x_c=19), CrashRule())
    assert not is_crash(crash._replace(n_c=150), CrashRule())
    assert not is_crash(crash._replace(x_b=30), CrashRule())
    assert not is_crash(crash._replace(n_b=9, x_b=0), CrashRule())


def test_evidence_beyond_the_largest_float_stays_a_number() -> None:
    found = harm_from([BucketCounts(10**6, 10**6, 10**6, 0)], ERROR)
    assert found.log_fast == pytest.approx(evidence.LOG_FAST_CAP)
    assert ln_ok([BucketCounts(10**9, 0, 10**9, 10**7)], ERROR) < math.inf


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.data())
def test_a_single_factor_is_the_likelihood_ratio_of_scipy(n: int, data: st.DataObject) -> None:
    x = data.draw(st.integers(0, n))
    factor = evidence._absolute_factor(n, x, 0.02)
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
    found = evidence._relative_factor(b.n_c, b.x_c, b.n_b, b.x_b, 1.5, "harm")
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
    assert log_uncapped(whole, replace(gate, harm=None)) == pytest.approx(
        log_uncapped(split, replace(gate, harm=None)), rel=1e-9, abs=1e-7
    )


@given(buckets(), limits, st.integers(0, 12))
def test_an_empty_bucket_changes_nothing(
    counts: list[BucketCounts], gate: Limits, place: int
) -> None:
    padded = [*counts[:place], BucketCounts(0, 0), *counts[place:]]
    assert harm_from(padded, gate) == harm_from(counts, gate)
    assert ln_ok(padded, gate) == ln_ok(counts, gate)
    assert evidence.early_z(padded, gate) == evidence.early_z(counts, gate)


@given(buckets(), limits, st.lists(st.integers(0, 12), max_size=4, unique=True))
def test_remembering_earlier_looks_changes_no_number(
    counts: list[BucketCounts], gate: Limits, starts: list[int]
) -> None:
    terms = evidence.step_terms(sorted(starts), 4)
    looks = [evidence.harm(counts[:seen], gate, terms) for seen in range(1, len(counts) + 1)]
    proofs = [evidence.proof(counts[:seen], gate) for seen in range(1, len(counts) + 1)]
    fold._folds.clear()
    assert evidence.harm(counts, gate, terms) == looks[-1]
    assert evidence.proof(counts, gate) == proofs[-1]


@given(buckets(), limits)
def test_a_cap_only_lowers_evidence(counts: list[BucketCounts], gate: Limits) -> None:
    """As it does so at every bucket, false rollbacks are limited as they are without the cap."""
    for seen in range(1, len(counts) + 1):
        found = harm_from(counts[:seen], gate)
        halves = [
            log_uncapped(counts[:seen], replace(gate, ratio=None)),
            log_uncapped(counts[:seen], replace(gate, harm=None)),
        ]
        assert found.log_e - 1e-9 <= found.log_fast <= min(halves) + 1e-9


def log_uncapped(counts: Sequence[BucketCounts], half: Limits) -> float:
    """The logarithm of the evidence of a gate with one alternative, without a cap."""
    sums = np.zeros(12)
    for n_c, x_c, n_b, x_b, _, _ in counts:
        factor = None
        if half.harm is not None:
            factor = evidence._absolute_factor(n_c, x_c, half.harm)
        elif half.ratio is not None:
            factor = evidence._relative_factor(n_c, x_c, n_b, x_b, half.ratio, "harm")
        sums += np.array(factor) if factor is not None else 0.0
    return float(logsumexp(sums)) - math.log(12)


def test_a_fall_uses_up_what_the_cap_cut_off_before_it_lowers_the_evidence() -> None:
    bad, good = BucketCounts(75, 7), BucketCounts(75, 0)
    once = harm_from([bad], ERROR, absolute_only=True)
    assert once.log_e == pytest.approx(math.log(4.0))
    after = harm_from([bad, good], ERROR, absolute_only=True)
    assert after.log_fast < once.log_fast
    assert after.log_e == once.log_e
    long = harm_from([bad, *[good] * 8], ERROR, absolute_only=True)
    assert long.log_e == long.log_fast < 0.0


def test_one_burst_multiplies_the_evidence_by_four_at_most() -> None:
    assert harm_from([BucketCounts(30, 30, 570, 2)], ERROR).log_e == pytest.approx(math.log(4.0))


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
    needed = evidence.requests_to_proof(evidence.proof(counts, ERROR), ERROR)
    logs = np.array(evidence._pass_logs(counts[0], ERROR))
    if needed is None:
        assert max(logs) <= 1e-12
        return

    def log_e_after(more: int) -> float:
        return float(logsumexp(logs * (n + more) / n)) - math.log(len(logs))

    # The part of the proof over all buckets is six tenths of it.
    wanted = evidence.LOG_PROVEN - math.log(0.6)
    assert log_e_after(needed) >= wanted - 1e-9
    if needed:
        assert log_e_after(needed - 1) < wanted + 1e-9


def test_a_rate_on_the_margin_is_never_called_provable() -> None:
    gate = Limits(1.5, 0.01, 0.01)
    proof = evidence.proof([BucketCounts(1000, 20, 1000, 10)], gate)
    assert evidence.requests_to_proof(proof, gate) is None


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
            found = evidence.harm(counts[:seen], ERROR, evidence.step_terms(begun, 4)).log_e
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
        proven += ln_ok(counts, ERROR) >= evidence.LOG_PROVEN
    assert proven / 400 <= 0.10


def test_equal_arms_without_an_answer_near_the_median_are_proven_to_be_as_fast() -> None:
    typical = TypicalGate().limits()
    assert typical is not None
    # With two kinds of answers, one ten times as long, the longer limit counts the same answers.
    equal = [BucketCounts(225, 112, 75, 37, 112, 112)] * 20
    assert evidence.proof(equal, typical).log_e >= evidence.LOG_PROVEN
    twice_as_many = [BucketCounts(225, 220, 75, 37, 220, 220)] * 20
    assert evidence.proof(twice_as_many, typical).log_e < evidence.LOG_PROVEN
    assert harm_from(twice_as_many, typical).log_e >= math.log(400.0)
