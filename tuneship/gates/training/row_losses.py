"""Losses of the same validation rows under two models, and what their differences show.

Rows that are hard for one model are hard for the other too, so the differences vary far less than the losses do.
Next: `training_gates.py`, gates T3, T4, T7 and T9.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Self

from pydantic import ValidationError

from tuneship.contract.reports.job_reports import RowLosses

# Normal quantiles: 1 % and 5 % on one side.
Z_1, Z_5 = 2.33, 1.645
# Fewer differences do not show how much they vary.
MIN_ROWS = 8


# A larger loss is as broken as an infinite one, and its square is too large for a float.
LARGEST_LOSS = 1e6
# No error that is as small decides anything: losses are published with five digits.
SMALLEST_ERROR = 1e-6


@dataclass(frozen=True)
class Paired:
    """Mean losses of two models over the same rows; the mean of their differences, and its standard error."""

    ours: float
    theirs: float
    mean: float
    error: float
    rows: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Self:
        """The difference is ours minus theirs."""
        differences = [ours - theirs for ours, theirs in pairs]
        return cls(
            fmean(ours for ours, _ in pairs),
            fmean(theirs for _, theirs in pairs),
            fmean(differences),
            stdev(differences) / math.sqrt(len(pairs)),
            len(pairs),
        )

    def __str__(self) -> str:
        """The mean with its standard error."""
        return f"{self.mean:+.4f} ± {self.error:.4f} over {self.rows} rows"

    def needs(self, error: float) -> int:
        """The number of rows that would make the standard error this small."""
        return math.ceil(self.rows * (self.error / error) ** 2)


def read_row_losses(metrics: Mapping[str, Any]) -> RowLosses | None:
    """The row losses in a job's metrics; None if they are missing or contradict each other.

    A loss that is not finite is None.
    """
    try:
        losses = RowLosses.model_validate(metrics.get("row_losses"))
    except ValidationError:
        return None
    models = {"start": losses.start, "served": losses.served, "compared": losses.compared}
    columns = (losses.judge, losses.trained_on, *models.values())
    if any(one is not None and len(one) != len(losses.rows) for one in columns):
        return None
    if any(loss is not None and loss < 0 for column in models.values() for loss in column or ()):
        return None
    known = {
        name: column
        and [loss if loss is not None and loss <= LARGEST_LOSS else None for loss in column]
        for name, column in models.items()
    }
    return losses.model_copy(update=known)


def judged(
    losses: RowLosses, ours: Sequence[float | None], theirs: Sequence[float | None]
) -> Paired | None:
    """Compare two models on the rows that judge, and that no training has seen; None where they are too few."""
    columns = zip(losses.judge, losses.trained_on, ours, theirs, strict=True)
    pairs = [
        (mine, other)
        for judges, is_trained, mine, other in columns
        if judges and not is_trained and mine is not None and other is not None
    ]
    return Paired.of(pairs) if len(pairs) >= MIN_ROWS else None
