"""Cells: counts by size, and the limits of latency that are made of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gates.drawn import KINDS, Service
from tests.unit.gates.drawn.rules import begin, series_of
from tests.unit.gates.drawn.worlds import Behaviour, Minute, cells_of
from tests.unit.gates.rollouts import plan_with
from tuneship.gates import tallies
from tuneship.gates.latency import _sum, number_above
from tuneship.gates.statistics.cells import Cells, cell_of, value_at

VALUES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60)


@given(VALUES)
def test_a_cell_holds_the_values_up_to_its_upper_edge(values: list[float]) -> None:
    cells = cells_of(np.array(values))
    assert cells.total == len(values)
    for k in cells.index:
        at = sum(value_at(k - 1) * (1 + 1e-9) < v <= value_at(k) * (1 + 1e-9) for v in values)
        assert at == dict(zip(cells.index, cells.count, strict=True))[k]


@given(VALUES, st.sampled_from([0.01, 0.5, 0.95, 0.99]))
def test_a_quantile_of_cells_is_within_one_cell_of_the_exact_one(
    values: list[float], share: float
) -> None:
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = value_at(cells_of(np.array(values)).quantile_cell(share))
    assert exact * (1 - 1e-9) <= found <= exact * 2 ** (1 / 16) * (1 + 1e-9)


@given(VALUES, VALUES)
def test_the_sum_of_cells_counts_the_values_of_both(one: list[float], other: list[float]) -> None:
    both = _sum([cells_of(np.array(one)), cells_of(np.array(other))])
    assert both == cells_of(np.array(one + other))


def test_above_counts_what_lies_beyond_the_edge_of_a_cell() -> None:
    cells = Cells((10, 12), (3, 4))
    assert [cells.above(k) for k in (9, 10, 11, 12)] == [7, 4, 4, 0]
    assert cell_of(value_at(7)) == pytest.approx(7.0)


def test_a_bucket_s_limits_do_not_read_the_bucket() -> None:
    service = Service(np.random.default_rng(3), KINDS["equal"].make(np.random.default_rng(3)))
    plan = plan_with()
    hour = [service.bucket(number, 0) for number in range(-60, 0)]
    record = begin(plan, hour, 3)
    buckets = [*hour[-10:], *(service.bucket(number, 5) for number in range(12))]
    usual = tallies.measure(series_of(buckets), record, plan)[0]
    slow = Service(
        np.random.default_rng(4),
        lambda *_: Minute(3000.0, Behaviour(time=9.0), Behaviour(time=9.0)),
    )
    for place in range(10, 22):
        other = replace(slow.bucket(0, 5), end=buckets[place].end)
        changed = [*buckets[:place], other, *buckets[place + 1 :]]
        found = tallies.measure(series_of(changed), record, plan)[0]
        assert found[place - 10].limits == usual[place - 10].limits
    assert all(one.limits is not None for one in usual)


def test_limits_follow_the_baseline_within_ten_buckets() -> None:
    slower = Service(np.random.default_rng(5), lambda *_: Minute(300.0, Behaviour(time=3.0)))
    usual = Service(np.random.default_rng(6), lambda *_: Minute())
    plan = plan_with()
    hour = [usual.bucket(number, 0) for number in range(-60, 0)]
    record = begin(plan, hour, 5)
    buckets = [*hour[-10:], *(slower.bucket(number, 5) for number in range(12))]
    measured, now, _ = tallies.measure(series_of(buckets), record, plan)
    first = measured[0].limits
    assert first is not None
    assert now is not None
    assert now.slow_ms == pytest.approx(3 * first.slow_ms, rel=0.15)


def test_a_histogram_s_limit_is_rounded_up_to_an_edge() -> None:
    bucket = Service(np.random.default_rng(7), lambda *_: Minute()).bucket(0, 0)
    traffic = replace(bucket.baseline, cells=None)
    edges = series_of([bucket]).edges_ms["baseline"]
    histogram = traffic.histogram
    assert histogram is not None
    assert edges is not None
    above_512 = histogram[-1] - histogram[edges.index(512.0)]
    assert number_above(traffic, edges, cell_of(512.0)) == above_512
    assert number_above(traffic, edges, cell_of(300.0)) == above_512


def test_rounding_of_estimates_is_even_over_the_buckets() -> None:
    bucket = Service(np.random.default_rng(8), lambda *_: Minute()).bucket(0, 0)
    plain = replace(
        bucket.baseline, cells=None, histogram=None, quantiles_ms=(400.0, 900.0, 1500.0), requests=7
    )
    plain = replace(plain, errors=0)
    total = dither = 0.0
    for _ in range(1000):
        dither = (dither + 0.6180339887) % 1.0
        total += number_above(plain, None, cell_of(900.0), dither=dither)
    assert total / 1000 == pytest.approx(0.35, abs=0.01)
