"""What the metrics operation does: stored one-second windows merged into the interval that was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tuneship.contract import metrics as contract
from tuneship.contract.metrics import METRIC_NAMES, DeploymentMetrics, MetricName
from tuneship.metrics.windows import EDGES_MS, Window, merged
from tuneship.service.context import Context
from tuneship.service.deployments import own_deployment
from tuneship.service.endpoints import own_endpoint
from tuneship.service.refusals import refused
from tuneship.service.serving_table import serves
from tuneship.store import metric_windows

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_POINTS = 11_000
INGESTION_LAG_S = 1.0
"""A bucket can still change for so long after its end: the recorder stores twice a second."""
QUANTILES = (0.5, 0.95, 0.99)
DEFAULT_SPAN = timedelta(hours=1)


@dataclass(frozen=True)
class Buckets:
    """Finished and running buckets of one answer; `windows[i]` starts at `starts[i]` (epoch seconds)."""

    interval_s: int
    starts: Sequence[int]
    windows: Sequence[Window]
    now: float

    def complete(self, start: int) -> bool:
        """Whether nothing can be added any more."""
        return start + self.interval_s + INGESTION_LAG_S <= self.now

    def series(self, chosen: Sequence[tuple[int, Window]]) -> dict[str, Any]:
        """The fields that every series has."""
        return {
            "timestamps": [datetime.fromtimestamp(start, UTC) for start, _ in chosen],
            "complete": [self.complete(start) for start, _ in chosen],
        }

    @property
    def all(self) -> list[tuple[int, Window]]:
        """Every bucket, empty ones too."""
        return list(zip(self.starts, self.windows, strict=True))


@serves(contract.get_deployment_metrics)
def get_deployment_metrics(  # noqa: PLR0913 - the description's own query parameters
    context: Context,
    deployment_id: str,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    metrics: list[MetricName] | None = None,
    interval: str = "1m",
    endpoint_id: str | None = None,
) -> DeploymentMetrics:
    """Read, merge, render."""
    interval_s = _seconds(interval)
    end = end_time or context.now
    for name, moment in (("start_time", start_time), ("end_time", end_time)):
        if moment is not None and not 1970 < moment.year < 9999:
            raise refused(name, "must lie after 1970 and before 9999")
    start = start_time or end - DEFAULT_SPAN
    if start >= end:
        raise refused("start_time", "must be before end_time")
    own_deployment(context, deployment_id)
    if endpoint_id is not None:
        own_endpoint(context, endpoint_id)
    context.parts.store_metrics()
    buckets = _buckets(context, deployment_id, endpoint_id, (start, end), interval_s)
    total = merged(buckets.windows)
    span_s = (end - start).total_seconds()
    series: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name in metrics or METRIC_NAMES:
        series[name] = SERIES[name](buckets)
        summary[name] = SUMMARY[name](total, span_s)
    return DeploymentMetrics.model_validate(
        {
            "deployment_id": deployment_id,
            "start_time": start,
            "end_time": end,
            "interval": interval,
            "metrics": series,
            "summary": summary,
        }
    )


def _seconds(interval: str) -> int:
    seconds = int(interval[:-1]) * UNIT_SECONDS[interval[-1]]
    if seconds > UNIT_SECONDS["d"]:
        raise refused("interval", "must be at most 1d")
    return seconds


def _buckets(
    context: Context,
    deployment_id: str,
    endpoint_id: str | None,
    span: tuple[datetime, datetime],
    interval_s: int,
) -> Buckets:
    first = int(span[0].timestamp()) // interval_s * interval_s
    last = span[1].timestamp()
    starts = range(first, max(first + 1, int(-(-last // 1))), interval_s)
    if len(starts) > MOST_POINTS:
        raise refused("interval", f"gives {len(starts)} points, at most {MOST_POINTS} are answered")
    grouped: dict[int, list[Window]] = {}
    with context.read() as connection:
        found = metric_windows.between(
            connection, deployment_id, endpoint_id, first, starts[-1] + interval_s
        )
    for begun, window in found:
        grouped.setdefault(begun // interval_s * interval_s, []).append(window)
    return Buckets(
        interval_s=interval_s,
        starts=starts,
        windows=[merged(grouped.get(start, ())) for start in starts],
        now=context.now.timestamp(),
    )


def _latency(buckets: Buckets) -> dict[str, Any]:
    """Buckets with successful requests only: an empty one has no latency."""
    chosen = [one for one in buckets.all if one[1].success_count]
    percentiles = [window.percentiles_ms(QUANTILES) for _, window in chosen]
    return {
        **buckets.series(chosen),
        "average": [window.average_ms for _, window in chosen],
        "p50": [row[0] for row in percentiles],
        "p95": [row[1] for row in percentiles],
        "p99": [row[2] for row in percentiles],
        "histogram": {
            "le": [*EDGES_MS, None],
            "counts": [window.histogram() for _, window in chosen],
        },
    }


def _throughput(buckets: Buckets) -> dict[str, Any]:
    return {
        **buckets.series(buckets.all),
        "requests_per_second": [
            window.request_count / buckets.interval_s for window in buckets.windows
        ],
    }


def _error_rate(buckets: Buckets) -> dict[str, Any]:
    chosen = [one for one in buckets.all if one[1].request_count]
    return {
        **buckets.series(chosen),
        "percentage": [window.error_percentage for _, window in chosen],
        "request_count": [window.request_count for _, window in chosen],
        "error_count": [window.error_count for _, window in chosen],
    }


def _token_usage(buckets: Buckets) -> dict[str, Any]:
    return {
        **buckets.series(buckets.all),
        "total": [window.input_tokens + window.output_tokens for window in buckets.windows],
        "input": [window.input_tokens for window in buckets.windows],
        "output": [window.output_tokens for window in buckets.windows],
        "empty_count": [window.empty_count for window in buckets.windows],
    }


def _latency_summary(total: Window, _span_s: float) -> dict[str, Any]:
    if not total.success_count:
        return {}
    p50, p95, p99 = total.percentiles_ms(QUANTILES)
    return {"average": total.average_ms, "p50": p50, "p95": p95, "p99": p99}


def _throughput_summary(total: Window, span_s: float) -> dict[str, Any]:
    return {"average_requests_per_second": total.request_count / span_s}


def _error_rate_summary(total: Window, _span_s: float) -> dict[str, Any]:
    return {
        "average_percentage": total.error_percentage if total.request_count else 0.0,
        "request_count": total.request_count,
        "error_count": total.error_count,
    }


def _token_usage_summary(total: Window, _span_s: float) -> dict[str, Any]:
    return {
        "total": total.input_tokens + total.output_tokens,
        "input": total.input_tokens,
        "output": total.output_tokens,
    }


SERIES = {
    "latency": _latency,
    "throughput": _throughput,
    "error_rate": _error_rate,
    "token_usage": _token_usage,
}
SUMMARY = {
    "latency": _latency_summary,
    "throughput": _throughput_summary,
    "error_rate": _error_rate_summary,
    "token_usage": _token_usage_summary,
}
