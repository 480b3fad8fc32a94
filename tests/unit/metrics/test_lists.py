"""Lists of numbers are read back as they were stored, whatever their lengths and sizes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuneship.metrics.lists import Lists, beside, packed, steps, summed, unpacked

ROWS = st.lists(st.lists(st.integers(-(2**33), 2**33), max_size=5), max_size=6)


def lists_of(rows: list[list[int]]) -> Lists:
    flat = [value for row in rows for value in row]
    return Lists(np.array(flat, np.int64), np.array([len(row) for row in rows], np.int64))


@given(ROWS)
def test_lists_are_read_back_as_they_were_stored(rows: list[list[int]]) -> None:
    lists = lists_of(rows)
    again = unpacked(packed(steps(lists)))
    assert again.lengths.tolist() == lists.lengths.tolist()
    assert summed(again).tolist() == lists.values.tolist()


@given(ROWS)
def test_lists_beside_each_other_follow_in_each_row(rows: list[list[int]]) -> None:
    lists = lists_of(rows)
    backwards = lists_of([row[::-1] for row in rows])
    both = beside(lists, backwards)
    assert [row.tolist() for row in both.rows()] == [row + row[::-1] for row in rows]


def test_small_numbers_take_a_byte_each() -> None:
    assert packed(lists_of([[0, 127, 128], []])) == [b"\x00\x7f\x80\x01", b""]
