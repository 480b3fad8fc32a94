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

from tuneship.contract.job_reports import RowLosses

# Normal quantiles: 1 % and 5 % on one side.
Z_1, Z_5 = 2.33, 1.645
# Fewer differences do not show how much they vary.
MIN_ROWS = 8


@dataclass(frozen=True)
class Paired:
    """The mean of a difference over rows, and its standard error."""

    mean: float
    error: float
    rows: int

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Self:
        """`ours` minus `theirs`, row by row."""
        differences = [one - other for one, other in zip(ours, theirs, strict=True)]
        return cls(fmean(differences), stdev(differences) / math.sqrt(len(differences)), len(ours))

    def __str__(self) -> str:
        """The mean with its standard error."""
        return f"{self.mean:+.4f} ± {self.error:.4f} over {self.rows} rows"

    def needs(self, error: float) -> int:
        """The number of rows at which the standard error would be this small."""
        return math.ceil(self.rows * (self.error / error) ** 2)


@dataclass(frozen=True)
class Judged:
    """The losses of the rows that judge: those that chose nothing, and that no training has seen."""

    start: list[float]
    served: list[float]
    compared: list[float]
    compared_model: str | None
    # Of the validation rows, and how many of them are training rows, too.
    rows: int
    duplicates: int


def read_row_losses(metrics: Mapping[str, Any]) -> RowLosses | None:
    """The row losses in a job's metrics; None where there are none, or where they contradict each other."""
    try:
        losses = RowLosses.model_validate(metrics.get("row_losses"))
    except ValidationError:
        return None
    columns = (losses.judge, losses.trained_on, losses.start, losses.served, losses.compared)
    if any(one is not None and len(one) != len(losses.rows) for one in columns):
        return None
    return losses


def judged_rows(losses: RowLosses) -> Judged | None:
    """The rows that judge; None where they are too few."""
    columns = [losses.start, losses.served, *([losses.compared] if losses.compared else [])]
    places = [
        place
        for place, judges in enumerate(losses.judge)
        if judges
        and not losses.trained_on[place]
        and all(column[place] is not None for column in columns)
    ]
    if len(places) < MIN_ROWS:
        return None

    def chosen(column: Sequence[float | None] | None) -> list[float]:
        return [float(column[place] or 0.0) for place in places] if column else []

    return Judged(
        start=chosen(losses.start),
        served=chosen(losses.served),
        compared=chosen(losses.compared),
        compared_model=losses.compared_model,
        duplicates=sum(losses.trained_on),
        rows=len(losses.rows),
    )
