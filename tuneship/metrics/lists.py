"""Lists of numbers in rows, and their stored form: each number takes seven bits a byte (LEB128). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]

# The smallest numbers that take two bytes, three, and so on.
_LONGER: Final = np.array([1 << 7 * size for size in range(1, 9)], np.int64)


@dataclass(frozen=True)
class Lists:
    """A list for each row: row i has the next `lengths[i]` numbers of `values`."""

    values: NDArray[Any]
    lengths: Whole

    @property
    def places(self) -> Whole:
        """The place of each value in its list."""
        number = int(self.lengths.sum())
        return np.arange(number, dtype=np.int64) - np.repeat(self.firsts, self.lengths)

    @property
    def firsts(self) -> Whole:
        """The place of the first value of each row."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def owners(self) -> Whole:
        """The row of each value."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def part(self, first: int, last: int) -> "Lists":
        """The rows from `first` to the one before `last`."""
        places = slice(self.lengths[:first].sum(), self.lengths[:last].sum())
        return Lists(self.values[places], self.lengths[first:last])

    def rows(self) -> list[NDArray[Any]]:
        """The list of each row."""
        ends = np.cumsum(self.lengths).tolist()
        return [self.values[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def steps(lists: Lists) -> Lists:
    """The differences within each list, after the first value, as non-negative numbers."""
    values = lists.values.astype(np.int64)
    differences = np.diff(values, prepend=0)
    firsts = lists.firsts[lists.lengths > 0]
    differences[firsts] = values[firsts]
    return Lists(differences << 1 ^ differences >> 63, lists.lengths)


def summed(lists: Lists) -> Whole:
    """The inverse of `steps`: the values."""
    differences = lists.values >> 1 ^ -(lists.values & 1)
    total = np.cumsum(differences)
    before = np.concatenate([[0], total])[lists.firsts]
    return total - np.repeat(before, lists.lengths)


def beside(*columns: Lists) -> Lists:
    """Concatenate the lists of each row."""
    lengths = np.stack([one.lengths for one in columns]).sum(axis=0)
    values = np.empty(lengths.sum(), np.int64)
    starts = np.cumsum(lengths) - lengths
    for one in columns:
        values[np.repeat(starts - one.firsts, one.lengths) + np.arange(len(one.values))] = (
            one.values
        )
        starts = starts + one.lengths
    return Lists(values, lengths)


def packed(lists: Lists) -> list[bytes]:
    """The stored bytes of each row of numbers, which are not negative."""
    sizes = np.searchsorted(_LONGER, lists.values, side="right") + 1
    ends = np.cumsum(sizes)
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    coded = np.repeat(lists.values, sizes) >> 7 * place & 127
    coded[place < np.repeat(sizes, sizes) - 1] |= 128
    stored = coded.astype(np.uint8).tobytes()
    bounds = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(lists.lengths)])].tolist()
    return [stored[first:end] for first, end in pairwise(bounds)]


def unpacked(stored: Sequence[bytes]) -> Lists:
    """The inverse of `packed`."""
    coded = np.frombuffer(b"".join(stored), np.uint8)
    is_last = coded < 128
    ends = np.flatnonzero(is_last) + 1
    firsts = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
    place = np.arange(len(coded)) - np.repeat(firsts, ends - firsts)
    parts = (coded & 127).astype(np.int64) << 7 * place
    values = np.add.reduceat(parts, firsts) if len(firsts) else parts
    sizes = np.fromiter(map(len, stored), np.int64, len(stored))
    counts = np.concatenate([[0], np.cumsum(is_last)])[np.concatenate([[0], np.cumsum(sizes)])]
    return Lists(values, np.diff(counts))
