"""Latency as shares: thresholds, histograms, three quantiles, and the rounding that carries its remainder."""

import math
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.unit.gates.rollouts import EDGES, START
from tuneship.gates.latency import (
    freeze_first_limits,
    freeze_limits,
    share_above,
    slow_requests,
)
from tuneship.gates.series import ArmTraffic, Bucket, RolloutSeries

INFINITE = tuple(math.inf if edge is None else float(edge) for edge in EDGES)


def quantiles(requests: int, p50: float, p95: float, p99: float) -> ArmTraffic:
    return ArmTraffic(requests=requests, quantiles_ms=(p50, p95, p99))


def histogram(latency: np.ndarray) -> ArmTraffic:
    counts = tuple(int((latency <= edge).sum()) for edge in INFINITE)
    return ArmTraffic(requests=len(latency), histogram=counts)


def series_of(
    baseline: list[ArmTraffic], *, edges: tuple[float, ...] | None = None
) -> RolloutSeries:
    buckets = tuple(
        Bucket(START + timedelta(minutes=i + 1), one, one) for i, one in enumerate(baseline)
    )
    return RolloutSeries(
        buckets, START, {}, {"baseline": edges, "candidate": edges}, counts_empty=False
    )


def test_the_line_meets_the_three_quantiles() -> None:
    one = quantiles(100, 400.0, 900.0, 1500.0)
    assert share_above(one, None, 400.0) == pytest.approx(0.5)
    assert share_above(one, None, 900.0) == pytest.approx(0.05, abs=1e-4)
    assert share_above(one, None, 1500.0) == pytest.approx(0.01, abs=1e-4)


@given(st.floats(1.0, 1e5), st.floats(0.0, 2.0), st.floats(0.1, 1e6))
def test_a_lognormal_s_share_is_that_of_scipy(
    median: float, sigma: float, threshold: float
) -> None:
    p50, p95, p99 = (median * math.exp(sigma * z) for z in (0.0, 1.6449, 2.3263))
    found = share_above(quantiles(1, p50, p95, p99), None, threshold)
    if sigma > 1e-6:
        expected = stats.norm.sf((math.log(threshold) - math.log(median)) / sigma)
        assert found == pytest.approx(expected, abs=1e-6)
    assert 0.0 <= found <= 1.0


def test_equal_quantiles_are_a_step_and_zero_latency_is_no_error() -> None:
    assert share_above(quantiles(1, 5.0, 5.0, 5.0), None, 5.1) == pytest.approx(0.0)
    assert share_above(quantiles(1, 5.0, 5.0, 5.0), None, 4.9) == pytest.approx(1.0)
    assert share_above(quantiles(1, 0.0, 0.0, 0.0), None, 1.0) == pytest.approx(0.0)


def test_an_edge_at_the_threshold_is_exact_and_beyond_the_last_edge_all_is_slow() -> None:
    one = ArmTraffic(requests=10, histogram=(2, 7, 9, 10))
    edges = (100.0, 200.0, 400.0, math.inf)
    assert share_above(one, edges, 200.0) == pytest.approx(0.3)
    assert share_above(one, edges, 50.0) == pytest.approx(0.9)
    assert share_above(one, edges, math.sqrt(200.0 * 400.0)) == pytest.approx(0.2)
    assert share_above(one, edges, 5000.0) == pytest.approx(0.1)


@given(st.integers(0, 2**32), st.floats(1.0, 5000.0), st.floats(1.0, 5000.0))
def test_a_higher_threshold_never_finds_more_slow_answers(
    seed: int, one: float, other: float
) -> None:
    drawn = histogram(np.random.default_rng(seed).lognormal(5.0, 1.0, 50))
    low, high = sorted((one, other))
    assert share_above(drawn, INFINITE, low) >= share_above(drawn, INFINITE, high) - 1e-12


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.floats(100.0, 2000.0))
def test_rounding_carries_its_remainder(requests: list[int], threshold: float) -> None:
    series = series_of([quantiles(n, 400.0, 900.0, 1500.0) for n in requests])
    counts = slow_requests(series, series.buckets, "candidate", threshold)
    exact = sum(
        n * share_above(quantiles(n, 400.0, 900.0, 1500.0), None, threshold) for n in requests
    )
    assert abs(sum(counts) - exact) <= 0.5 + 1e-6
    assert all(0 <= count <= n for count, n in zip(counts, requests, strict=True))


def test_version_1_froze_thresholds_with_the_bucket_that_reaches_two_hundred() -> None:
    early, late = quantiles(99, 400.0, 900.0, 1500.0), quantiles(101, 500.0, 1000.0, 2000.0)
    assert freeze_first_limits(series_of([early]), series_of([early]).buckets) is None
    series = series_of([early, late, quantiles(10_000, 1.0, 1.0, 1.0)])
    limits = freeze_first_limits(series, series.buckets)
    assert limits is not None
    assert (limits.slow_ms, limits.very_slow_ms, limits.requests) == (1000.0, 3000.0, 200)


def test_no_thresholds_freeze_before_two_hundred_answers() -> None:
    series = series_of([quantiles(199, 400.0, 900.0, 1500.0)])
    assert freeze_limits(series, series.buckets) is None


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("has_histograms", [False, True])
def test_a_stall_just_before_the_start_does_not_blind_the_latency_gates(
    newest_first: bool, has_histograms: bool
) -> None:
    random = np.random.default_rng(9)

    def minute(scale: float) -> ArmTraffic:
        drawn = random.lognormal(6.0, 0.5, 300) * scale
        if has_histograms:
            return histogram(drawn)
        p50, p95, p99 = np.quantile(drawn, (0.5, 0.95, 0.99))
        return quantiles(300, float(p50), float(p95), float(p99))

    minutes = [minute(1.0) for _ in range(58)]
    edges = INFINITE if has_histograms else None
    calm, stalled = series_of(minutes, edges=edges), series_of([*minutes, minute(3.0), minute(3.0)])
    stalled = replace(stalled, edges_ms=calm.edges_ms)
    usual = freeze_limits(calm, calm.buckets)
    buckets = stalled.buckets[::-1] if newest_first else stalled.buckets
    found = freeze_limits(stalled, buckets)
    assert usual is not None
    assert found is not None
    assert found.slow_ms == pytest.approx(usual.slow_ms, rel=0.03)
    assert found.very_slow_ms == pytest.approx(usual.very_slow_ms, rel=0.03)


def test_an_hour_with_few_buckets_is_extended_to_fifteen() -> None:
    hourly = [quantiles(100, 400.0, 900.0 + hour, 1500.0) for hour in range(40)]
    buckets = tuple(
        Bucket(START + timedelta(hours=hour), one, one) for hour, one in enumerate(hourly)
    )
    series = replace(series_of([]), buckets=buckets)
    limits = freeze_limits(series, buckets)
    assert limits is not None
    assert (limits.requests, limits.slow_ms) == (1500, 932.0)


def test_merged_histograms_give_thresholds_that_five_percent_exceed() -> None:
    random = np.random.default_rng(5)
    series = series_of(
        [histogram(random.lognormal(5.0, 0.5, 150)) for _ in range(2)], edges=INFINITE
    )
    limits = freeze_limits(series, series.buckets)
    assert limits is not None
    assert sum(slow_requests(series, series.buckets, "baseline", limits.slow_ms)) == 15
    assert limits.very_slow_ms > 1.5 * limits.slow_ms


def test_a_bucket_whose_answers_all_failed_has_no_latency_and_counts_none() -> None:
    series = series_of([ArmTraffic(requests=5, errors=5), quantiles(300, 400.0, 900.0, 1500.0)])
    assert slow_requests(series, series.buckets, "candidate", 900.0) == [0, 15]
