"""The statistics of paired answers against independent computations: worked numbers, scipy, statsmodels."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize_scalar
from statsmodels.api import OLS
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from tuneship.gates.evaluation.paired import (
    MIN_CLUSTERS_THAT_DIFFER,
    STAKES,
    ClusterSums,
    Estimate,
    PairedCounts,
    compare,
    examples_needed,
    holm,
    log_e_worse,
    mean_interval,
    p_mcnemar,
    provable_margin,
    tango_interval,
    wilson,
    z_tango,
)
from tuneship.gates.statistics.distributions import (
    Z_ONE_SIDED_5,
    fair_coin_tail,
    student_quantile,
    student_tail,
)


@st.composite
def paired(draw: st.DrawFn, most: int = 3000) -> PairedCounts:
    n = draw(st.integers(1, most))
    wins = draw(st.integers(0, n))
    losses = draw(st.integers(0, n - wins))
    return PairedCounts(n, wins, losses, draw(st.integers(0, n - wins - losses)))


margins = st.floats(0.001, 0.1)


WORKED = {
    # Wins, losses, examples: E, p, z, difference, both ends of its interval.
    (58, 62, 1000): (0.1550, 0.3922, 2.3295, -0.0040, -0.0222, 0.0141),
    (30, 60, 1000): (0.4632, 0.001030, 0.0000, -0.0300, -0.0460, -0.0146),
    (40, 95, 1000): (3.5658, 1.236e-6, -2.2008, -0.0550, -0.0743, -0.0363),
    (5, 40, 150): (3838.6, 3.939e-8, -4.6753, -0.2333, -0.3019, -0.1678),
    (0, 0, 200): (0.4378, 1.0, 2.4871, 0.0000, -0.0133, 0.0133),
    (1, 12, 60): (11.046, 0.001709, -2.6757, -0.1833, -0.2840, -0.0969),
}


@pytest.mark.parametrize(("given_counts", "stated"), WORKED.items(), ids=str)
def test_the_worked_examples_have_their_numbers(
    given_counts: tuple[int, int, int], stated: tuple[float, ...]
) -> None:
    wins, losses, n = given_counts
    counts = PairedCounts(n, wins, losses)
    interval = tango_interval(counts)
    found = (interval.value, interval.low, interval.high)
    assert math.exp(log_e_worse(counts, 0.03)) == pytest.approx(stated[0], rel=4e-4)
    assert p_mcnemar(counts) == pytest.approx(stated[1], rel=4e-4)
    assert z_tango(counts, -0.03) == pytest.approx(stated[2], abs=5.1e-5)
    assert found == pytest.approx(stated[3:], abs=5.1e-5)


def test_the_needed_examples_have_their_numbers() -> None:
    assert examples_needed(PairedCounts(1000, 58, 62), 0.03) == 830
    # For the share that differs, the margin's table of the documentation, without the one more of each kind.
    many = 10**7
    table = {
        0.05: (124, 247, 396, 742),
        0.03: (343, 687, 1099, 2060),
        0.02: (773, 1545, 2472, 4635),
    }
    for margin, row in table.items():
        for share, needed in zip((0.05, 0.10, 0.16, 0.30), row, strict=True):
            counts = PairedCounts(many, int(many * share) // 2, int(many * share) // 2)
            assert examples_needed(counts, margin) == pytest.approx(needed, abs=2)


@given(paired(), margins)
def test_as_many_examples_as_needed_prove_the_margin(counts: PairedCounts, margin: float) -> None:
    provable = provable_margin(counts)
    assert (examples_needed(counts, margin) <= counts.examples) == (provable <= margin)


# McNemar, Student, Wilson, Holm.


@given(st.integers(0, 400), st.integers(0, 400))
@example(0, 0)
def test_mcnemar_is_the_exact_binomial_test(wins: int, losses: int) -> None:
    found = p_mcnemar(PairedCounts(1000, wins, losses))
    if wins + losses == 0:
        assert found == 1.0
    else:
        right = stats.binomtest(losses, wins + losses, 0.5, alternative="greater").pvalue
        assert found == pytest.approx(right, rel=1e-9)


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_tail_of_a_coin_is_that_of_fractions(heads: int, tosses: int) -> None:
    ways = sum(math.comb(tosses, k) for k in range(heads, tosses + 1))
    assert fair_coin_tail(heads, tosses) == pytest.approx(float(Fraction(ways, 2**tosses)))


@given(st.floats(-60, 60), st.integers(1, 100_000))
@example(0.0, 1)
@example(math.inf, 7)
def test_student_has_the_tail_of_scipy(t: float, freedom: int) -> None:
    right = float(stats.t.sf(t, freedom))
    assume(right > 1e-280)
    assert student_tail(t, freedom) == pytest.approx(right, rel=1e-7)


def test_nothing_lies_beyond_infinity() -> None:
    assert student_tail(math.inf, 7) == student_tail(1e200, 7) == 0.0
    assert student_tail(-math.inf, 7) == 1.0


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 29, 49, 499, 99_999])
@pytest.mark.parametrize("tail", [0.4, 0.05, 0.025, 1e-6])
def test_student_has_the_quantile_of_scipy(tail: float, freedom: int) -> None:
    assert student_quantile(tail, freedom) == pytest.approx(stats.t.isf(tail, freedom), rel=1e-8)


@given(st.integers(0, 2000), st.integers(1, 2000))
def test_a_score_has_the_interval_of_wilson(right: int, n: int) -> None:
    assume(right <= n)
    low, high = proportion_confint(right, n, alpha=0.05, method="wilson")
    found = wilson(right, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert 0.0 <= found.low <= found.value == right / n <= found.high <= 1.0


def test_a_score_of_no_example_may_be_anything() -> None:
    assert wilson(0, 0) == Estimate(0.0, 0.0, 1.0)


def test_holm_has_the_limits_of_the_worked_example() -> None:
    assert holm([0.0004, 0.004, 0.011, 0.3], 0.02) == [True, True, False, False]
    assert holm([0.02, 0.01], 0.02) == [True, True]
    p = p_mcnemar(PairedCounts(60, 1, 12))
    refused = [number for number in range(1, 20) if holm([p] + [1.0] * (number - 1), 0.02)[0]]
    assert refused == list(range(1, 12))


@given(st.lists(st.floats(0, 0.1), min_size=1, max_size=12), st.floats(0.001, 0.1))
def test_holm_refuses_what_statsmodels_does(values: list[float], alpha: float) -> None:
    adjusted = multipletests(values, alpha, method="holm")[1]
    assume(all(abs(p - alpha) > 1e-12 for p in adjusted))
    assert holm(values, alpha) == [bool(p <= alpha) for p in adjusted]


# Tango.


def z_by_likelihood(counts: PairedCounts, difference: float) -> float:
    """The score statistic, with the likeliest share of losses found numerically."""
    n, w, lost, ties = counts.examples, counts.wins, counts.losses, counts.ties

    def unlikelihood(losses: float) -> float:
        shares = (losses + difference, losses, 1.0 - 2.0 * losses - difference)
        terms = zip((w, lost, ties), shares, strict=True)
        return -sum(k * math.log(max(share, 1e-300)) for k, share in terms if k)

    bounds = (max(0.0, -difference), (1.0 - difference) / 2.0)
    losses = minimize_scalar(unlikelihood, bounds=bounds, options={"xatol": 1e-13}).x
    variance = (2.0 * losses + difference - difference**2) / n
    return (counts.difference - difference) / math.sqrt(variance)


@given(paired(), st.floats(-0.9, 0.9))
@example(PairedCounts(200, 0, 0), -0.03)
@example(PairedCounts(200, 200, 0), 0.5)
def test_tango_is_the_score_test_at_the_numerical_maximum_of_the_likelihood(
    counts: PairedCounts, difference: float
) -> None:
    assume(abs(difference) > 1e-3)
    right = z_by_likelihood(counts, difference)
    assert z_tango(counts, difference) == pytest.approx(right, rel=1e-3, abs=1e-3)


def test_a_difference_that_leaves_no_chance_is_refused_without_limit() -> None:
    assert z_tango(PairedCounts(10, 10, 0), 1.0) == 0.0
    assert z_tango(PairedCounts(10, 9, 0), 1.0) == -math.inf
    assert z_tango(PairedCounts(10, 0, 0), 0.0) == 0.0
    assert tango_interval(PairedCounts(0, 0, 0)) == Estimate(0.0, -1.0, 1.0)


@given(paired(), margins)
def test_the_interval_lies_above_minus_the_margin_exactly_where_the_grader_passes(
    counts: PairedCounts, margin: float
) -> None:
    test = compare(counts, margin)
    interval = test.difference
    assert -1.0 <= interval.low <= interval.value <= interval.high <= 1.0
    assert test.is_within_margin == (interval.low >= -margin)
    for end, z in ((interval.low, Z_ONE_SIDED_5), (interval.high, -Z_ONE_SIDED_5)):
        if abs(end) < 1.0:
            # On the last step of a float, z may jump from one side to the other.
            assert z_tango(counts, end - 1e-9) >= z >= z_tango(counts, end + 1e-9)


@given(paired())
def test_exchanged_models_have_the_mirrored_interval(counts: PairedCounts) -> None:
    one, other = tango_interval(counts), tango_interval(counts.swapped)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-12)


# The early test.


def test_the_stakes_run_from_2_to_90_percent_in_equal_ratios() -> None:
    assert (STAKES[0], STAKES[-1], len(STAKES)) == (0.02, pytest.approx(0.9), 6)
    assert np.ptp(np.diff(np.log(STAKES))) < 1e-12


@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=200), margins)
def test_the_evidence_is_a_mean_of_products_over_the_examples(
    outcomes: list[int], margin: float
) -> None:
    wins, losses = outcomes.count(1), outcomes.count(-1)
    counts = PairedCounts(len(outcomes), wins, losses)
    products = [math.prod(1.0 - stake * (d + margin) for d in outcomes) for stake in STAKES]
    assert log_e_worse(counts, margin) == pytest.approx(math.log(sum(products) / 6), abs=1e-9)


@given(st.floats(0, 1), margins)
def test_one_example_brings_no_evidence_on_average_to_a_candidate_within_the_margin(
    differing: float, margin: float
) -> None:
    # On the margin: so much more is lost than won.
    assume(differing >= margin)
    win, loss = (differing - margin) / 2, (differing + margin) / 2
    chances = {(1, 0): win, (0, 1): loss, (0, 0): 1.0 - differing}
    mean = sum(
        chance * math.exp(log_e_worse(PairedCounts(1, *pair), margin))
        for pair, chance in chances.items()
    )
    assert mean == pytest.approx(1.0)


def test_a_large_set_of_losses_overflows_nothing() -> None:
    assert log_e_worse(PairedCounts(100_000, 0, 100_000), 0.1) > 10_000
    assert p_mcnemar(PairedCounts(100_000, 0, 100_000)) == 0.0
    assert p_mcnemar(PairedCounts(100_000, 50_000, 50_000)) == pytest.approx(0.5, abs=0.01)


# Clusters.


def clustered(seed: int, clusters: int) -> list[list[int]]:
    dice = np.random.default_rng(seed)
    return [
        dice.choice((-1, 0, 0, 0, shift), size=dice.integers(1, 21)).tolist()
        for shift in dice.choice((-1, 0, 1), size=clusters)
    ]


def counted(clusters: list[list[int]]) -> tuple[PairedCounts, ClusterSums]:
    outcomes = list(itertools.chain.from_iterable(clusters))
    counts = PairedCounts(len(outcomes), outcomes.count(1), outcomes.count(-1))
    return counts, ClusterSums.of((len(one), sum(one)) for one in clusters)


@pytest.mark.parametrize("number", [30, 50, 200])
def test_the_error_over_clusters_is_that_of_statsmodels(number: int) -> None:
    clusters = clustered(number, number)
    counts, sums = counted(clusters)
    outcomes = np.concatenate([np.array(one, dtype=float) for one in clusters])
    groups = np.repeat(np.arange(number), [len(one) for one in clusters])
    fitted = OLS(outcomes, np.ones(len(outcomes))).fit(
        cov_type="cluster", cov_kwds={"groups": groups}, use_t=True
    )
    assert sums.standard_error(counts) == pytest.approx(fitted.bse[0])
    test = compare(counts, 0.03, sums)
    assert test.difference.value == pytest.approx(fitted.params[0])
    low, high = fitted.conf_int(alpha=0.1)[0]
    assert (test.difference.low, test.difference.high) == pytest.approx((low, high))
    assert test.is_within_margin == (low > -0.03)
    one_sided = stats.t.cdf(fitted.tvalues[0], number - 1)
    assert test.p_worse == pytest.approx(one_sided)


def test_clusters_that_all_agree_prove_no_more_than_as_many_examples() -> None:
    """A spread of 0 would prove any margin: of candidates on it, a fifth would pass."""
    for number, is_proven in ((50, False), (100, True)):
        counts, sums = counted([[0] * 10] * number)
        assert sums.standard_error(counts) == 0.0
        test = compare(counts, 0.03, sums)
        assert (
            test.is_within_margin
            == is_proven
            == compare(PairedCounts(number, 0, 0), 0.03).is_within_margin
        )
        assert test.p_worse == 1.0


def test_clusters_that_all_lose_alike_are_surely_worse() -> None:
    counts, sums = counted([[-1, 0]] * 50)
    assert compare(counts, 0.03, sums).p_worse == 0.0


@given(st.integers(2, 60), st.integers(0, 2**32))
def test_few_clusters_that_differ_never_make_the_interval_narrower(number: int, seed: int) -> None:
    clusters = clustered(seed, number)
    for one in clusters[MIN_CLUSTERS_THAT_DIFFER - 1 :]:
        one[:] = [0] * len(one)
    counts, sums = counted(clusters)
    test, units = compare(counts, 0.03, sums), PairedCounts(number, sums.won, sums.lost)
    assert test.difference.low <= tango_interval(units).low
    assert test.difference.high >= tango_interval(units).high
    assert test.p_worse >= p_mcnemar(units)


# Means of graded scores.


def test_a_mean_has_the_interval_of_student() -> None:
    values = np.random.default_rng(3).random(40).tolist()
    found = mean_interval(values, 0.025, 0.0, 1.0)
    low, high = stats.t.interval(0.95, 39, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    assert mean_interval(values[::-1], 0.025, 0.0, 1.0) == found


def test_a_mean_of_few_values_may_be_anything_and_none_leaves_its_range() -> None:
    assert mean_interval([], 0.025, 0.0, 1.0) == Estimate(0.0, 0.0, 1.0)
    assert mean_interval([0.4], 0.05, -1.0, 1.0) == Estimate(0.4, -1.0, 1.0)
    assert mean_interval([1.0, 0.0, 1.0], 0.025, 0.0, 1.0).high == 1.0


@pytest.mark.parametrize("counts", [(10, 6, 5, 0), (10, -1, 0, 0), (10, 5, 5, 1)])
def test_counts_that_contradict_each_other_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="contradict"):
        PairedCounts(*counts)
