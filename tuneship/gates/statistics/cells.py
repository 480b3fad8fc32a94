"""Counts by size in cells of 4.4 %, so that a limit on times or lengths is a limit and no guess between coarse edges.

Pure. Next: `series.py` has them for each bucket, `latency.py` sets limits by them.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

PER_DOUBLING = 16


@dataclass(frozen=True, slots=True)
class Cells:
    """Counts by cell: cell k holds values in (2^((k-1)/16), 2^(k/16)]. Sorted by index, counts above 0."""

    index: tuple[int, ...]
    count: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of values in all cells."""
        return sum(self.count)

    def above(self, k: int) -> int:
        """The number of values above 2^(k/16)."""
        return sum(self.count[bisect_right(self.index, k) :])

    def quantile_cell(self, share: float) -> int:
        """The first cell up to which at least this share of the values lies. Raises ValueError without values."""
        wanted, seen = share * self.total, 0
        for k, count in zip(self.index, self.count, strict=True):
            seen += count
            if seen >= wanted:
                return k
        raise ValueError("the quantile of nothing")


NO_CELLS = Cells((), ())


def cell_of(value: float) -> float:
    """The index of the cell that holds a value: cell k ends at the value whose index is k."""
    return PER_DOUBLING * math.log2(value)


def value_at(place: float) -> float:
    """The value at a place among the cells."""
    return 2.0 ** (place / PER_DOUBLING)
