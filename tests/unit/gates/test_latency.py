"""Latency as shares on servers without cells: histograms, and three quantiles."""

import math
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.unit.gates.rollouts import EDGES, START, plan_with
from tuneship.gates.latency import _share_above, freeze_limits, usual_hour
from tuneship.gates.metrics.series import ARMS, ArmTraffic, Bucket, RolloutSeries
from tuneship.gates.statistics.cells import Cells

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
    return RolloutSeries(buckets, START, {}, {"baseline": edges, "candidate": edges})


def test_the_line_meets_the_three_quantiles() -> None:
    one = quantiles(100, 400.0, 900.0, 1500.0)
    assert _share_above(one, 400.0) == pytest.approx(0.5)
    assert _share_above(one, 900.0) == pytest.approx(0.05, abs=1e-4)
    assert _share_above(one, 1500.0) == pytest.approx(0.01, abs=1e-4)


@given(st.floats(1.0, 1e5), st.floats(0.0, 2.0), st.floats(0.1, 1e6))
def test_a_lognormal_s_share_is_that_of_scipy(
    median: float, sigma: float, threshold: float
) -> None:
    p50, p95, p99 = (median * math.exp(sigma * z) for z in (0.0, 1.6449, 2.3263))
    found = _share_above(quantiles(1, p50, p95, p99), threshold)
    if sigma > 1e-6:
        expected = stats.norm.sf((math.log(threshold) - math.log(median)) / sigma)
        assert found == pytest.approx(expected, abs=1e-6)
    assert 0.0 <= found <= 1.0


def test_equal_quantiles_are_a_step_and_zero_latency_is_no_error() -> None:
    assert _share_above(quantiles(1, 5.0, 5.0, 5.0), 5.1) == pytest.approx(0.0)
    assert _share_above(quantiles(1, 5.0, 5.0, 5.0), 4.9) == pytest.approx(1.0)
    assert _share_above(quantiles(1, 0.0, 0.0, 0.0), 1.0) == pytest.approx(0.0)


def test_no_limits_are_set_by_fewer_than_a_hundred_answers() -> None:
    series = series_of([quantiles(99, 400.0, 900.0, 1500.0)])
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
    assert limits.requests == 1500
    assert limits.slow_ms == pytest.approx(932.0)


def test_an_hour_of_servers_that_publish_different_counts_sets_no_limits() -> None:
    one = ArmTraffic(requests=60, cells=Cells((138,), (60,)))
    other = ArmTraffic(requests=60, histogram=(0, 60))
    buckets = tuple(
        Bucket(START + timedelta(minutes=i), arm, ArmTraffic())
        for i, arm in enumerate([one, other])
    )
    mixed = RolloutSeries(buckets, START, dict.fromkeys(ARMS), dict.fromkeys(ARMS))
    assert usual_hour(mixed, plan_with()).limits is None
