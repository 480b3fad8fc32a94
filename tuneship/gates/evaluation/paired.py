"""Two models on the same examples: whether the candidate is worse, and whether it is not. Pure.

A win is an example that only the candidate has right, a loss one that only the baseline has right. All formulas are
explained in `docs/evaluation.md`. Next: `verdict.py`, which decides.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Self

from tuneship.gates.statistics.distributions import (
    Z_ONE_SIDED_5,
    Z_TWO_SIDED_95,
    fair_coin_tail,
    student_quantile,
    student_tail,
)
from tuneship.gates.statistics.evidence import log_sum_exp

# Stakes of the early test, log-spaced, equal weights; the largest leaves something at a margin of 0.1.
STAKES = tuple(0.02 * 45.0 ** (k / 5) for k in range(6))
# (1.645 + 0.842)^2: the candidate must pass at 5 % with a probability of 80 %.
_EIGHTY_PERCENT = 6.18
# With fewer clusters that differ, their spread says too little.
MIN_CLUSTERS_THAT_DIFFER = 10
_HALVINGS = 60


@dataclass(frozen=True)
class PairedCounts:
    """Scored examples, and how many of them only the candidate, only the baseline, and both have right."""

    examples: int
    wins: int
    losses: int
    both_right: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for counts that contradict each other."""
        parts = (self.wins, self.losses, self.both_right)
        if min(parts) < 0 or sum(parts) > self.examples:
            raise ValueError("counts of one grader contradict each other")

    @property
    def ties(self) -> int:
        """Examples that both or neither have right."""
        return self.examples - self.wins - self.losses

    @property
    def difference(self) -> float:
        """The candidate's score minus the baseline's."""
        return (self.wins - self.losses) / self.examples if self.examples else 0.0

    @property
    def swapped(self) -> "PairedCounts":
        """The same examples with the two models exchanged."""
        return PairedCounts(self.examples, self.losses, self.wins, self.both_right)


@dataclass(frozen=True)
class ClusterSums:
    """Sums over clusters of size k in which the candidate has d more right answers than the baseline."""

    clusters: int
    # Clusters with d above and below 0; the sums of d^2, d k and k^2.
    won: int
    lost: int
    squares: int
    products: int
    sizes: int

    @classmethod
    def of(cls, clusters: Iterable[tuple[int, int]]) -> Self:
        """Add up pairs of a cluster's size and its wins minus losses."""
        pairs = list(clusters)
        return cls(
            len(pairs),
            sum(d > 0 for _, d in pairs),
            sum(d < 0 for _, d in pairs),
            sum(d * d for _, d in pairs),
            sum(d * k for k, d in pairs),
            sum(k * k for k, _ in pairs),
        )

    def standard_error(self, counts: PairedCounts) -> float:
        """Standard error of the difference, as examples of one cluster depend on each other."""
        mean, number = counts.difference, self.clusters
        spread = self.squares - 2.0 * mean * self.products + mean * mean * self.sizes
        # Rounding may bring a sum that is 0 below it.
        return math.sqrt(number / (number - 1) * max(spread, 0.0)) / counts.examples


@dataclass(frozen=True)
class Estimate:
    """A value with both ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """The tests of one grader on the same examples."""

    # The chance of such losses if the candidate is not worse.
    p_worse: float
    # Whether it is proven that the candidate is not worse by the margin or more.
    is_within_margin: bool
    # 90 %; its lower end is above -margin exactly where this is proven.
    difference: Estimate
    # Examples with which an equal candidate passes in 80 % of cases.
    needed: int


def log_e_worse(counts: PairedCounts, margin: float) -> float:
    """Logarithm of the evidence that the candidate is worse by more than the margin, valid at every look.

    Under the null hypothesis each factor has mean <= 1, so it ever reaches 1/a with probability at most a (Ville).
    """
    logs = [
        counts.wins * win + counts.losses * loss + counts.ties * tie
        for win, loss, tie in _log_factors(margin)
    ]
    return log_sum_exp(logs) - math.log(len(STAKES))


@lru_cache
def _log_factors(margin: float) -> Sequence[tuple[float, float, float]]:
    """For each stake the logarithms of its factors for a win, a loss and a tie."""
    return [
        (
            math.log1p(-stake * (1.0 + margin)),
            math.log1p(stake * (1.0 - margin)),
            math.log1p(-stake * margin),
        )
        for stake in STAKES
    ]


def p_mcnemar(counts: PairedCounts) -> float:
    """McNemar's exact one-sided test: the chance of so many losses or more if wins were as likely."""
    return fair_coin_tail(counts.losses, counts.wins + counts.losses)


def z_tango(counts: PairedCounts, difference: float) -> float:
    """Tango's score test: how far the observed difference lies above a true one, in standard errors."""
    if difference > 0.0:
        # The other way round nothing cancels in q.
        return -z_tango(counts.swapped, -difference)
    n, m = counts.examples, -difference
    distance = counts.wins - counts.losses + n * m
    b = -(counts.wins + counts.losses) - (2 * n - counts.wins + counts.losses) * m
    # The likeliest share of losses under a true difference of -m.
    root = math.sqrt(max(b * b - 8.0 * n * counts.losses * m * (1.0 + m), 0.0))
    q = (root - b) / (4.0 * n) if n else 0.0
    variance = n * (2.0 * q - m * (1.0 + m))
    if variance > 0.0:
        return distance / math.sqrt(variance)
    return math.copysign(math.inf, distance) if distance else 0.0


def tango_interval(counts: PairedCounts) -> Estimate:
    """The 90 % interval of the difference: the true ones that Tango's test refuses on neither side, at 5 % each."""
    value = counts.difference
    low = _last_above(Z_ONE_SIDED_5, counts, -1.0, value)
    return Estimate(value, low, _last_above(-Z_ONE_SIDED_5, counts, value, 1.0))


def _last_above(z: float, counts: PairedCounts, low: float, high: float) -> float:
    """The largest true difference at which Tango's z, which falls with it, is above a value; by bisection."""
    if z_tango(counts, high) > z:
        return high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if z_tango(counts, middle) > z else (low, middle)
    return low


def examples_needed(counts: PairedCounts, margin: float) -> int:
    """Examples with which an equal candidate passes in 80 % of cases, at the share of differing ones seen so far."""
    return math.ceil(_EIGHTY_PERCENT * _differing(counts) / margin**2)


def provable_margin(counts: PairedCounts) -> float:
    """The smallest margin at which an equal candidate passes in 80 % of cases, with the examples that there are."""
    return math.sqrt(_EIGHTY_PERCENT * _differing(counts) / max(counts.examples, 1))


def _differing(counts: PairedCounts) -> float:
    # One more of each kind: without any that differ, the share is not known to be 0.
    return (counts.wins + counts.losses + 1) / (counts.examples + 2)


def compare(counts: PairedCounts, margin: float, clusters: ClusterSums | None = None) -> PairedTest:
    """Test a candidate on examples that are independent, or that depend on each other within clusters.

    There must be two clusters or more.
    """
    if clusters is None:
        within = z_tango(counts, -margin) > Z_ONE_SIDED_5
        needed = examples_needed(counts, margin)
        return PairedTest(p_mcnemar(counts), within, tango_interval(counts), needed)
    freedom, error = clusters.clusters - 1, clusters.standard_error(counts)
    value, reach = counts.difference, student_quantile(0.05, freedom) * error
    p, low, high = _p_student(-value, error, freedom), value - reach, value + reach
    if clusters.won + clusters.lost < MIN_CLUSTERS_THAT_DIFFER:
        # A spread of 0 would prove anything; with each cluster as one example, too little shows as too little.
        units = PairedCounts(clusters.clusters, clusters.won, clusters.lost)
        of_units = tango_interval(units)
        p, low, high = max(p, p_mcnemar(units)), min(low, of_units.low), max(high, of_units.high)
    needed = math.ceil(_EIGHTY_PERCENT * error**2 * counts.examples / margin**2)
    return PairedTest(p, low > -margin, Estimate(value, max(low, -1.0), min(high, 1.0)), needed)


def _p_student(loss: float, error: float, freedom: int) -> float:
    """The chance of such a loss if there is none, by Student's t."""
    if error > 0.0:
        return student_tail(loss / error, freedom)
    return 0.0 if loss > 0.0 else 1.0


def wilson(right: int, examples: int) -> Estimate:
    """A share with Wilson's 95 % interval."""
    if not examples:
        return Estimate(0.0, 0.0, 1.0)
    share, z2 = right / examples, Z_TWO_SIDED_95**2
    middle = (share + z2 / (2 * examples)) / (1.0 + z2 / examples)
    reach = Z_TWO_SIDED_95 * math.sqrt(
        share * (1.0 - share) / examples + z2 / (4.0 * examples * examples)
    )
    reach /= 1.0 + z2 / examples
    # At the ends the share itself is one end, which rounding would miss.
    low = 0.0 if right == 0 else middle - reach
    return Estimate(share, low, 1.0 if right == examples else middle + reach)


def mean_interval(values: Sequence[float], tail: float, least: float, most: float) -> Estimate:
    """A mean with its Student-t interval (`tail` probability on each side), clipped to the range [least, most]."""
    mean = math.fsum(values) / len(values) if values else 0.0
    if len(values) < 2:
        return Estimate(mean, least, most)
    deviations = [value - mean for value in values]
    freedom = len(values) - 1
    error = math.sqrt(math.fsum(map(mul, deviations, deviations)) / freedom / len(values))
    reach = student_quantile(tail, freedom) * error
    return Estimate(mean, max(mean - reach, least), min(mean + reach, most))


def holm(values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses Holm's procedure refuses, at a level that holds for all of them together."""
    refused = [False] * len(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    for number, index in enumerate(order):
        if values[index] > alpha / (len(values) - number):
            break
        refused[index] = True
    return refused
