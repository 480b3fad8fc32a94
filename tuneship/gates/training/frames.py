"""A job's metrics as a pandas frame, for the training gates.

The only module of the gates that touches pandas, which ships no complete types: what leaves it is typed.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false, reportMissingTypeStubs=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pandas as pd

from tuneship.contract.declaring.frames import JOB_COLUMNS, job_frame


class UnreadableMetrics(ValueError):
    """The metrics record of a job (§2.1) is malformed; the message says why."""


@dataclass(frozen=True)
class MetricCurve:
    """A job's metrics by step, in a frame of float columns; null and absent values are NaN, infinities are kept."""

    # pandas.DataFrame, index `step`, columns `JOB_COLUMNS`.
    frame: Any

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def last_step(self) -> int:
        """The newest step; 0 without any."""
        return int(self.frame.index[-1]) if len(self) else 0

    def values(self, name: str) -> list[float]:
        """One column."""
        return self.frame[name].tolist()

    def evaluations(self) -> "MetricCurve":
        """The rows with a new finite validation loss: a repeated value is no new evidence."""
        # `map` over no rows gives no booleans, which would choose columns.
        is_known = self.frame["validation_loss"].map(math.isfinite).astype(bool)
        known = self.frame[is_known]
        return MetricCurve(known[known["validation_loss"].ne(known["validation_loss"].shift())])

    def after_step(self, step: int) -> "MetricCurve":
        """The rows of later steps."""
        return MetricCurve(self.frame[self.frame.index > step])


def read_curve(metrics: Mapping[str, Any]) -> MetricCurve:
    """Read a metrics record (§2.1) as a curve.

    Raises `UnreadableMetrics` for arrays of unequal length, text among numbers, or steps that do not rise strictly.
    """
    steps = metrics.get("steps")
    if not isinstance(steps, list):
        raise UnreadableMetrics("no steps")
    steps = cast("list[Any]", steps)
    columns: dict[str, list[float]] = {}
    for name in JOB_COLUMNS:
        values = metrics.get(name)
        if values is not None and (not isinstance(values, list) or len(values) != len(steps)):
            raise UnreadableMetrics(f"{name} is not as long as steps")
        column = cast("list[Any]", values or [None] * len(steps))
        # A flag is an int to Python, and would be counted as 0 or 1.
        if any(isinstance(v, bool) or not isinstance(v, int | float | None) for v in column):
            raise UnreadableMetrics(f"{name} holds something that is no number")
        try:
            columns[name] = [math.nan if value is None else float(value) for value in column]
        except OverflowError:
            raise UnreadableMetrics(f"{name} holds a number that is too large") from None
    # `isinstance` would take True for step 1.
    whole = [step for step in steps if type(step) is int]
    if len(whole) != len(steps) or any(a >= b for a, b in pairwise(whole)):
        raise UnreadableMetrics("steps do not rise strictly")
    return MetricCurve(job_frame(whole, columns))


def lowest_median(values: Sequence[float], count: int) -> float:
    """The lowest median of `count` values in a row."""
    lowest: Any = pd.Series(values).rolling(count).median().min()
    return float(lowest)
