"""Latency as a proportion: the share of answers above a frozen threshold, from a histogram or three quantiles.

Pure arithmetic over one series; knows no steps and no verdict. Next: `tallies.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from datetime import timedelta

from tuneship.gates.gate_types import LatencyLimits
from tuneship.gates.series import Arm, ArmTraffic, Bucket, RolloutSeries

# Baseline answers from which the thresholds may be frozen.
ENOUGH_REQUESTS = 200
# Recent enough to be the load of today; with little traffic, enough buckets for a median of them.
FROZEN_FROM, LEAST_BUCKETS = timedelta(hours=1), 15
# A stretch of the baseline whose p95 is this many times the usual one had a stall and sets no limits.
STALLED_RATIO = 2.0
# Fewer answers say little about a p95, so neighbouring buckets are merged up to here.
_STRETCH_REQUESTS = 50
# Quantiles of the normal distribution.
_Z50, _Z95, _Z99 = 0.0, 1.6449, 2.3263
# A latency of 0 has no logarithm, and a deployment whose p50 is its p95 would divide by 0.
_LEAST_MS = 1e-6
_LEAST_SLOPE = 1e-9


def freeze_limits(series: RolloutSeries, buckets: Sequence[Bucket]) -> LatencyLimits | None:
    """Freeze the baseline's p95 and 1.5 x its p99 in the last hour of these buckets, given in any order.

    None where they hold fewer than 200 answers. An hour with little traffic is extended to 15 buckets with some.
    """
    served = sorted(
        (b for b in buckets if b.baseline.served and has_latency(b.baseline)),
        key=lambda bucket: bucket.end,
    )
    hour = [bucket for bucket in served if bucket.end > served[-1].end - FROZEN_FROM]
    chosen = [bucket.baseline for bucket in served[-max(len(hour), LEAST_BUCKETS) :]]
    requests = sum(arm.served for arm in chosen)
    if requests < ENOUGH_REQUESTS:
        return None

    # A stall within the hour would raise the merged quantiles and blind the gates to a slow candidate.
    # Without histograms the medians over buckets leave it out by themselves.
    edges, kept = series.edges_ms["baseline"], chosen
    if edges is not None and all(arm.histogram is not None for arm in chosen):
        stretches: list[list[ArmTraffic]] = [[]]
        for arm in chosen:
            if sum(of.served for of in stretches[-1]) >= _STRETCH_REQUESTS:
                stretches.append([])
            stretches[-1].append(arm)
        measured = [(_quantiles(stretch, edges)[0], stretch) for stretch in stretches]
        usual = _weighted_median([(p95, sum(of.served for of in part)) for p95, part in measured])
        kept = [arm for p95, part in measured if p95 <= STALLED_RATIO * usual for arm in part]
    p95, p99 = _quantiles(kept, edges)
    return LatencyLimits(slow_ms=p95, very_slow_ms=1.5 * p99, requests=requests)


def freeze_first_limits(series: RolloutSeries, buckets: Sequence[Bucket]) -> LatencyLimits | None:
    """Freeze the limits as formula version 1 did: from the first buckets that reach 200 answers together."""
    chosen: list[ArmTraffic] = []
    served = 0
    for bucket in buckets:
        if bucket.baseline.served and has_latency(bucket.baseline):
            chosen.append(bucket.baseline)
            served += bucket.baseline.served
        if served >= ENOUGH_REQUESTS:
            break
    if served < ENOUGH_REQUESTS:
        return None
    p95, p99 = _quantiles(chosen, series.edges_ms["baseline"])
    return LatencyLimits(slow_ms=p95, very_slow_ms=1.5 * p99, requests=served)


def median_p95_ms(traffic: Sequence[ArmTraffic], edges: Sequence[float] | None) -> float:
    """p95 in ms of buckets that all have answers and their latency: of the merged histograms, else the median."""
    return _quantiles(traffic, edges)[0]


def slow_requests(
    series: RolloutSeries, buckets: Sequence[Bucket], arm: Arm, threshold_ms: float
) -> list[int]:
    """Answers above the threshold per bucket. Shares are estimates, so the remainder of each rounding is carried on."""
    edges = series.edges_ms[arm]
    total, rounded = 0.0, 0
    counts: list[int] = []
    for bucket in buckets:
        traffic = bucket[arm]
        if traffic.served and has_latency(traffic):
            total += share_above(traffic, edges, threshold_ms) * traffic.served
        count = min(traffic.served, math.floor(total + 0.5) - rounded)
        rounded += count
        counts.append(count)
    return counts


def has_latency(traffic: ArmTraffic) -> bool:
    """Whether the bucket says how long its answers took."""
    return traffic.histogram is not None or traffic.quantiles_ms is not None


def share_above(traffic: ArmTraffic, edges: Sequence[float] | None, threshold_ms: float) -> float:
    """Share of answers above the threshold, 0..1."""
    if traffic.histogram is not None and edges is not None:
        # An edge at the threshold is exact; between edges the share is linear in log latency; above the
        # last finite one nothing is known, and all counts as slow.
        counts, i = traffic.histogram, bisect_left(edges, threshold_ms)
        below, upto = (counts[i - 1] if i else 0), counts[i]
        if math.isinf(edges[i]):
            return 1.0 - below / counts[-1]
        # Below the first edge lies 0, which has no logarithm.
        if i == 0:
            return 1.0 - upto / counts[-1] * threshold_ms / edges[i]
        low, high = _log(edges[i - 1]), _log(edges[i])
        part = (_log(threshold_ms) - low) / (high - low)
        return 1.0 - (below + part * (upto - below)) / counts[-1]
    if traffic.quantiles_ms is None:
        raise ValueError("the bucket has no latency")

    # Latencies are roughly log-normal, which is a straight line in (log latency, z): it runs through
    # p50 and p95, and above p95 through p95 and p99, since tails are heavier than that.
    p50, p95, p99 = map(_log, traffic.quantiles_ms)
    threshold = _log(threshold_ms)
    if threshold <= p95:
        z = _Z50 + (threshold - p50) / max((p95 - p50) / (_Z95 - _Z50), _LEAST_SLOPE)
    else:
        z = _Z95 + (threshold - p95) / max((p99 - p95) / (_Z99 - _Z95), _LEAST_SLOPE)
    return 0.5 * (1.0 - math.erf(z / math.sqrt(2.0)))


def _quantiles(traffic: Sequence[ArmTraffic], edges: Sequence[float] | None) -> tuple[float, float]:
    """p95 and p99 in ms: of the merged histograms, else the medians over buckets, weighted by requests."""
    if edges is not None and all(arm.histogram is not None for arm in traffic):
        merged = [
            sum(column) for column in zip(*(arm.histogram or () for arm in traffic), strict=True)
        ]
        return _inverse(merged, edges, 0.95), _inverse(merged, edges, 0.99)
    # Quantiles cannot be merged; the median is the one of a typical bucket.
    known = [(arm.quantiles_ms, arm.served) for arm in traffic if arm.quantiles_ms is not None]
    return (
        _weighted_median([(quantiles[1], served) for quantiles, served in known]),
        _weighted_median([(quantiles[2], served) for quantiles, served in known]),
    )


def _inverse(counts: Sequence[int], edges: Sequence[float], quantile: float) -> float:
    """The threshold in ms below which `share_above` leaves the quantile; at most the last finite edge."""
    wanted = quantile * counts[-1]
    i = bisect_left(counts, wanted)
    if i == 0:
        return edges[0] * wanted / counts[0]
    if math.isinf(edges[i]):
        return edges[i - 1]
    part = (wanted - counts[i - 1]) / (counts[i] - counts[i - 1])
    low, high = _log(edges[i - 1]), _log(edges[i])
    return math.exp(low + part * (high - low))


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    half = sum(weight for _, weight in values) / 2.0
    seen = 0
    for value, weight in sorted(values):
        seen += weight
        if seen >= half:
            return value
    raise ValueError("the median of nothing")


def _log(latency_ms: float) -> float:
    return math.log(max(latency_ms, _LEAST_MS))
