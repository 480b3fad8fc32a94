"""Series for charts: at most so many points, with the extremes kept. Pure."""

from collections.abc import Sequence
from typing import Any

MOST_POINTS = 400


def thinned(columns: Sequence[Sequence[Any]], most: int = MOST_POINTS) -> list[list[Any]]:
    """The columns at rows that show the same shape: of each group of rows those with the least and the largest value.

    The first column is the axis, the second decides which rows of a group stay; the first and the last row always do.
    """
    size = len(columns[0]) if columns else 0
    if size <= most:
        return [list(column) for column in columns]
    groups = most // 2 - 1
    kept = {0, size - 1}
    for number in range(groups):
        rows = range(number * size // groups, (number + 1) * size // groups)
        valued = [row for row in rows if columns[1][row] is not None]
        if valued:
            kept.add(min(valued, key=lambda row: columns[1][row]))
            kept.add(max(valued, key=lambda row: columns[1][row]))
    return [[column[row] for row in sorted(kept)] for column in columns]


def smoothed(values: Sequence[float], share: float = 0.12) -> list[float]:
    """The values, each moved towards the mean of those before it: `share` is the weight of the newest."""
    mean: float | None = None
    made: list[float] = []
    for value in values:
        mean = value if mean is None else mean + (value - mean) * share
        made.append(mean)
    return made
