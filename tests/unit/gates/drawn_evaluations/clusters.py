"""Examples that depend on each other within clusters of ten, and how often their test is wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tuneship.gates.evaluation.paired import ClusterSums, PairedCounts, compare
from tuneship.gates.statistics.distributions import student_quantile

SIZE, MARGIN = 10, 0.03


@dataclass(frozen=True)
class ClusterKind:
    """A row of the table: the number of clusters, how many examples differ, and the share of clusters that agree."""

    clusters: int
    differing: float
    # In such a cluster, all examples are a win, or all a loss, or all a tie.
    agreeing: float

    def draw(self, better: float, seed: int) -> tuple[PairedCounts, ClusterSums]:
        """Draw a candidate that is better by this share."""
        dice = np.random.default_rng((seed, self.clusters))
        chance = dice.random((self.clusters, SIZE))
        agree = dice.random(self.clusters) < self.agreeing
        chance[agree] = chance[agree, :1]
        win, loss = (self.differing + better) / 2, (self.differing - better) / 2
        outcomes = np.where(chance < win, 1, np.where(chance < win + loss, -1, 0))
        wins, losses = int((outcomes == 1).sum()), int((outcomes == -1).sum())
        sums = ClusterSums.of((SIZE, int(one)) for one in outcomes.sum(axis=1))
        return PairedCounts(outcomes.size, wins, losses), sums


@dataclass(frozen=True)
class WrongEnds:
    """Shares of candidates on the margin that pass, by Student's t alone and now, and of equal ones that are worse."""

    passed_by_t: float
    passed: float
    worse: float


def wrong_ends(kind: ClusterKind, seeds: Iterable[int]) -> WrongEnds:
    """How often the test of a kind is wrong."""
    quantile = student_quantile(0.05, kind.clusters - 1)
    by_t, passed, worse = [], [], []
    for seed in seeds:
        counts, sums = kind.draw(-MARGIN, seed)
        by_t.append(counts.difference + MARGIN > quantile * sums.standard_error(counts))
        passed.append(compare(counts, MARGIN, sums).is_within_margin)
        counts, sums = kind.draw(0.0, seed)
        worse.append(compare(counts, MARGIN, sums).p_worse <= 0.02)
    return WrongEnds(*(sum(found) / len(found) for found in (by_t, passed, worse)))


CLUSTER_KINDS = (
    ClusterKind(50, 0.03, 1.0),
    ClusterKind(50, 0.10, 0.3),
    ClusterKind(50, 0.16, 0.0),
    ClusterKind(100, 0.03, 1.0),
    ClusterKind(100, 0.05, 1.0),
    ClusterKind(100, 0.10, 0.3),
    ClusterKind(100, 0.16, 0.3),
    ClusterKind(100, 0.16, 1.0),
    ClusterKind(500, 0.05, 1.0),
)
