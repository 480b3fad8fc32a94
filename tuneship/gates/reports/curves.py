"""The curves of reports: losses by step, error rate and latency by time. Pure.

Next: `flows/release/reports/plots.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tuneship.contract.reports.job_reports import JobMetrics
from tuneship.gates.metrics.series import Arm, ArmTraffic, RolloutSeries


@dataclass(frozen=True)
class ArmPoint:
    """One deployment in the stretch of time that begins at `at`. NaN without a successful request."""

    at: datetime
    error_percent: float
    # Means of the buckets' percentiles, weighted by requests.
    p50_ms: float
    p95_ms: float


def arm_curve(series: RolloutSeries, arm: Arm, seconds: int) -> list[ArmPoint]:
    """Pool the buckets of each `seconds`, from the first bucket on; a stretch without requests has no point."""
    pooled: dict[int, list[ArmTraffic]] = {}
    for bucket in series.buckets:
        stretch = int((bucket.end - series.buckets[0].end).total_seconds() // seconds)
        pooled.setdefault(stretch, []).append(bucket[arm])
    points: list[ArmPoint] = []
    for stretch, traffic in pooled.items():
        if requests := sum(one.requests for one in traffic):
            at = series.buckets[0].end + timedelta(seconds=stretch * seconds)
            failed = 100.0 * sum(one.errors for one in traffic) / requests
            p50, p95 = mean_percentile(traffic, 0), mean_percentile(traffic, 1)
            points.append(ArmPoint(at, failed, _or_nan(p50), _or_nan(p95)))
    return points


def mean_percentile(traffic: Sequence[ArmTraffic], index: int) -> float | None:
    """The mean of the buckets' p50, p95 or p99 (0, 1, 2), weighted by requests; None without any.

    The percentile of the whole cannot be known: the metrics have no single times.
    """
    timed = [(one.requests, one.quantiles_ms[index]) for one in traffic if one.quantiles_ms]
    weight = sum(requests for requests, _ in timed)
    return sum(requests * value for requests, value in timed) / weight if weight else None


def evaluations(metrics: JobMetrics) -> list[tuple[int, float]]:
    """Steps at which the model was evaluated, with its validation loss: a repeated value is no evaluation."""
    found: list[tuple[int, float]] = []
    for step, loss in zip(metrics.steps, metrics.validation_loss, strict=False):
        if loss is not None and (not found or loss != found[-1][1]):
            found.append((step, loss))
    return found


def smoothed(values: Sequence[float | None], span: int) -> list[float]:
    """A moving average over about `span` steps; NaN before the first value."""
    keep = 1.0 - 2.0 / (span + 1.0)
    total = weight = 0.0
    means: list[float] = []
    for value in values:
        total, weight = keep * total, keep * weight
        if value is not None:
            total, weight = total + value, weight + 1.0
        means.append(total / weight if weight else math.nan)
    return means


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
