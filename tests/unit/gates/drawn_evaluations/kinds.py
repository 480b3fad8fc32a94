"""The rows and columns of the table: how two models differ, on how many examples, and with which margin."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tuneship.gates.evaluation.paired import PairedCounts
from tuneship.gates.evaluation.verdict import (
    LOOK_EXAMPLES,
    EvaluationCounts,
    EvaluationRules,
    GraderCounts,
    SliceCounts,
    judge,
    look,
)

# Sizes of the ten slices, as shares of all examples: 34.1, 17.1, 11.4, 8.5, 6.8, 5.7, 4.9, 4.3, 3.8 and 3.4 %.
SLICES = np.array([1 / k for k in range(1, 11)]) / math.fsum(1 / k for k in range(1, 11))
# The columns: number of examples and margin.
SIZES = ((200, 0.05), (500, 0.05), (1000, 0.03), (2000, 0.02), (5000, 0.03))
# Neither model has a share of the examples right, and both have the rest of the ties.
BOTH_RIGHT = 0.6


@dataclass(frozen=True)
class EvaluationKind:
    """A row of the table: the share of examples that only one model has right, and by how much one is better."""

    name: str
    differing: float = 0.10
    # The share of all examples by which the candidate has more right.
    better: float = 0.0
    # The slice that loses this share of its examples on top.
    slice_number: int = 0
    slice_loss: float = 0.0
    # Of graders that decide, on draws of their own.
    graders: int = 1

    def draw(self, examples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The slice of each example; and 1 for a win, -1 for a loss and 0 for a tie, a row for each grader."""
        dice = np.random.default_rng((seed, examples))
        slices = dice.choice(len(SLICES), size=examples, p=SLICES)
        wins = self.differing / 2 + max(self.better, 0.0)
        losses = np.full(examples, self.differing / 2 + max(-self.better, 0.0))
        losses[slices == self.slice_number] += self.slice_loss
        chance = dice.random((self.graders, examples))
        return slices, np.where(chance < wins, 1, np.where(chance < wins + losses, -1, 0))


@dataclass(frozen=True)
class Ends:
    """The shares of the verdicts of one kind, and the mean number of examples they took."""

    shares: Mapping[str, float]
    examples: float


def judged(kind: EvaluationKind, examples: int, margin: float, seed: int) -> tuple[str, int]:
    """The verdict of the product, looking after every 25 examples, and the number of examples it took."""
    slices, outcomes = kind.draw(examples, seed)
    rules = EvaluationRules(tuple(f"g{one}" for one in range(kind.graders)), margin)
    wins, losses = np.cumsum(outcomes == 1, axis=1), np.cumsum(outcomes == -1, axis=1)
    for n in range(LOOK_EXAMPLES, examples, LOOK_EXAMPLES):
        pairs = zip(wins[:, n - 1].tolist(), losses[:, n - 1].tolist(), strict=True)
        found = look(EvaluationCounts(_graders(n, pairs)), rules)
        if found:
            return str(found.verdict), n
    pairs = zip(wins[:, -1].tolist(), losses[:, -1].tolist(), strict=True)
    of_slices = [
        SliceCounts("site", str(number), f"g{grader}", _counts(outcomes[grader, slices == number]))
        for grader in range(kind.graders)
        for number in range(len(SLICES))
    ]
    counts = EvaluationCounts(_graders(examples, pairs), tuple(of_slices))
    return str(judge(counts, rules).verdict), examples


def _graders(examples: int, pairs: Iterable[tuple[int, int]]) -> tuple[GraderCounts, ...]:
    return tuple(
        GraderCounts(f"g{number}", PairedCounts(examples, w, lost, _both(examples - w - lost)))
        for number, (w, lost) in enumerate(pairs)
    )


def _counts(outcomes: NDArray[np.int64]) -> PairedCounts:
    wins, losses = int((outcomes == 1).sum()), int((outcomes == -1).sum())
    return PairedCounts(len(outcomes), wins, losses, _both(len(outcomes) - wins - losses))


def _both(ties: int) -> int:
    return math.ceil(BOTH_RIGHT * ties)


def ends(kind: EvaluationKind, examples: int, margin: float, seeds: Iterable[int]) -> Ends:
    """The shares of the verdicts over these seeds."""
    found = [judged(kind, examples, margin, seed) for seed in seeds]
    numbers = Counter(verdict for verdict, _ in found)
    shares = {name: numbers[name] / len(found) for name in ("pass", "reject", "hold")}
    return Ends(shares, fmean(taken for _, taken in found))


KINDS = {
    kind.name: kind
    for kind in (
        EvaluationKind("equal, 10 % differ"),
        EvaluationKind("equal, 16 % differ", 0.16),
        EvaluationKind("equal, 30 % differ", 0.30),
        EvaluationKind("equal, 16 % differ, two graders decide", 0.16, graders=2),
        EvaluationKind("2 points better", better=0.02),
        EvaluationKind("1 point worse", better=-0.01),
        EvaluationKind("2 points worse", better=-0.02),
        EvaluationKind("3 points worse", better=-0.03),
        EvaluationKind("5 points worse", better=-0.05),
        EvaluationKind("10 points worse", better=-0.10),
        EvaluationKind("equal, a slice of 4.3 % loses 30", slice_number=7, slice_loss=0.30),
        EvaluationKind("equal, a slice of 11.4 % loses 30", slice_number=2, slice_loss=0.30),
        EvaluationKind("equal, a slice of 11.4 % loses 15", slice_number=2, slice_loss=0.15),
        EvaluationKind("equal, a slice of 34 % loses 10", slice_number=0, slice_loss=0.10),
    )
}
# Kinds whose candidate is not worse, so that at most 5 % may be rejected.
NOT_WORSE = [name for name, kind in KINDS.items() if kind.better >= 0.0 and not kind.slice_loss]
