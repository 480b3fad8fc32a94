"""What the metrics operation does: read windows, merge them into the interval that was asked for, render columns.

The answer may have 50,000 points, so it is rendered from arrays, not from models; a test holds it against the contract.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray

from tuneship.contract import metrics as contract
from tuneship.contract.common import render_time
from tuneship.contract.metrics import METRIC_NAMES, MetricName
from tuneship.metrics import columns
from tuneship.metrics.columns import EDGES_MS, FACTS, QUANTILES, Records, Whole
from tuneship.service.common.refusals import refuse_times_out_of_range, refused
from tuneship.service.context.bindings import serves_encoded
from tuneship.service.context.context import Context
from tuneship.service.deployments.handlers import own_deployment
from tuneship.service.endpoints.handlers import own_endpoint
from tuneship.store import metric_windows
from tuneship.store.metric_windows import EVERY, MINUTE, SECOND, WIDTHS, WindowSource

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# A month by minutes has 43,200.
MOST_POINTS = 50_000
# A bucket can still change for so long after its end: the recorder stores several times a second.
INGESTION_LAG_S = 1.0
DEFAULT_SPAN = timedelta(hours=1)
# Ages of what is in flight. From 10 s on the gates ask which requests are certainly older than a
# limit.
AGES_MS = (
    *(100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 12_000.0, 15_000.0, 20_000.0),
    *(25_000.0, 30_000.0, 40_000.0, 50_000.0, 60_000.0, 80_000.0, 100_000.0, 120_000.0),
    *(150_000.0, 200_000.0, 250_000.0, 300_000.0, 400_000.0, 500_000.0, 600_000.0),
)
RENDERING = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Buckets:
    """Every bucket of one answer: `facts[i]` starts at `starts[i]` (epoch seconds); empty ones are zeros."""

    interval_s: int
    starts: Whole
    facts: Records
    total: Records
    """One record: what was counted in `summed`."""
    summed: range
    """The seconds of the summary."""
    now: float

    def series(self, chosen: Mask | slice) -> dict[str, Any]:
        """The fields that every series has."""
        starts = self.starts[chosen]
        return {
            "timestamps": starts.astype("datetime64[s]"),
            "complete": starts + (self.interval_s + INGESTION_LAG_S) <= self.now,
        }


@serves_encoded(contract.get_deployment_metrics)
def get_deployment_metrics(  # noqa: PLR0913 - the description's own query parameters
    context: Context,
    deployment_id: str,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    metrics: list[MetricName] | None = None,
    interval: str = "1m",
    endpoint_id: str | None = None,
) -> bytes:
    """Read, merge, render."""
    start, end = _span(context, start_time, end_time)
    starts = _starts(start, end, _seconds(interval))
    own_deployment(context, deployment_id)
    if endpoint_id is not None:
        own_endpoint(context, endpoint_id)
    context.parts.store_metrics()
    now = context.now.timestamp()
    summed = _summed(start, end, now)
    with context.read() as connection:
        series = WindowSource(deployment_id, endpoint_id or EVERY)
        buckets = Buckets(
            interval_s=starts.step,
            starts=np.arange(starts.start, starts.stop, starts.step),
            facts=_facts(connection, series, starts, now),
            total=_total(connection, series, summed),
            summed=summed,
            now=now,
        )
    chosen = metrics or METRIC_NAMES
    answer: dict[str, Any] = {
        "deployment_id": deployment_id,
        "start_time": render_time(start),
        "end_time": render_time(end),
        "interval": interval,
        "metrics": {name: SERIES[name](buckets) for name in METRIC_NAMES if name in chosen},
        "summary": {name: SUMMARY[name](buckets) for name in METRIC_NAMES if name in chosen},
        "summary_start_time": _rendered(summed.start),
        "summary_end_time": _rendered(summed.stop),
        "generate_timeout_seconds": context.parts.settings.generate_timeout_s,
    }
    if end_time is None or end.timestamp() >= now:
        answer["in_flight"] = _in_flight(
            context.parts.in_flight.ages_ms(deployment_id, endpoint_id)
        )
    return orjson.dumps(answer, option=RENDERING)


def _in_flight(ages_ms: list[float]) -> dict[str, Any]:
    ages_ms.sort()
    counts = [bisect_right(ages_ms, edge) for edge in AGES_MS]
    ages = {"le": [*AGES_MS, None], "counts": [*counts, len(ages_ms)]}
    return {"requests": len(ages_ms), "ages_ms": ages}


def _span(
    context: Context, start_time: datetime | None, end_time: datetime | None
) -> tuple[datetime, datetime]:
    refuse_times_out_of_range(start_time=start_time, end_time=end_time)
    end = (end_time or context.now).astimezone(UTC)
    start = (start_time or end - DEFAULT_SPAN).astimezone(UTC)
    if start >= end:
        raise refused("start_time", "must be before end_time")
    return start, end


def _seconds(interval: str) -> int:
    seconds = int(interval[:-1]) * UNIT_SECONDS[interval[-1]]
    if seconds > UNIT_SECONDS["d"]:
        raise refused("interval", "must be at most 1d")
    return seconds


def _starts(start: datetime, end: datetime, interval_s: int) -> range:
    """Where buckets start: on multiples of the interval; the last one holds the moment before `end`."""
    first = int(start.timestamp()) // interval_s * interval_s
    count = -int((first - end.timestamp()) // interval_s)
    if count > MOST_POINTS:
        raise refused("interval", f"gives {count} points, at most {MOST_POINTS} are answered")
    return range(first, first + count * interval_s, interval_s)


def _facts(connection: sa.Connection, series: WindowSource, starts: range, now: float) -> Records:
    """A record for every bucket, from the widest windows that fit into it."""
    width = max(width for width in WIDTHS if starts.step % width == 0)
    span = (starts.start, starts.stop)
    if width == SECOND:
        _refuse_what_is_forgotten(connection, series, starts, now)
    if width == starts.step:
        found, facts = metric_windows.facts(connection, series, width, *span)
    else:
        begun, windows = metric_windows.sketches(connection, series, width, *span)
        found, merged = columns.grouped(windows, begun // starts.step * starts.step)
        facts = merged.facts
    every = np.zeros(len(starts), FACTS)
    every[(found - starts.start) // starts.step] = facts
    return every


def _refuse_what_is_forgotten(
    connection: sa.Connection, series: WindowSource, starts: range, now: float
) -> None:
    """Single seconds are kept for two days: a gap where there was traffic would be a lie."""
    known = metric_windows.oldest(SECOND, now)
    if starts.start < known and metric_windows.has_traffic(
        connection, series, starts.start // 60 * 60, min(known, starts.stop)
    ):
        raise refused("interval", "must be whole minutes: the time reaches back over 2 days")


def _summed(start: datetime, end: datetime, now: float) -> range:
    """The span of the summary: the seconds that [start, end) touches.

    Where single seconds are forgotten, it grows to the whole minutes that the span touches: their counts cannot be
    divided, and a longer span's counts must never be shown as those of a shorter one.
    """
    known = metric_windows.oldest(SECOND, now)
    first, last = math.floor(start.timestamp()), math.ceil(end.timestamp())
    if first < known:
        first -= first % MINUTE
    if last < known:
        last += -last % MINUTE
    return range(first, last)


def _rendered(moment: int) -> str:
    return render_time(datetime.fromtimestamp(moment, UTC))


def _total(connection: sa.Connection, series: WindowSource, summed: range) -> Records:
    windows = metric_windows.whole(connection, series, summed.start, summed.stop)
    _, total = columns.grouped(windows, np.zeros(len(windows), np.int64))
    return total.facts if len(total) else np.zeros(1, FACTS)


def _latency(buckets: Buckets) -> dict[str, Any]:
    """Buckets with successful requests only: an empty one has no latency."""
    chosen: Mask = buckets.facts["requests"] > buckets.facts["errors"]
    facts = buckets.facts[chosen]
    return {
        **buckets.series(chosen),
        "average": facts["latency_sum_ms"] / (facts["requests"] - facts["errors"]),
        **{name: _column(facts, name) for name in QUANTILES},
        "histogram": {"le": [*EDGES_MS, None], "counts": _column(facts, "histogram")},
    }


def _column(facts: Records, name: str) -> NDArray[Any]:
    """The renderer takes whole arrays only."""
    return np.ascontiguousarray(facts[name])


def _throughput(buckets: Buckets) -> dict[str, Any]:
    return {
        **buckets.series(slice(None)),
        "requests_per_second": buckets.facts["requests"] / buckets.interval_s,
    }


def _error_rate(buckets: Buckets) -> dict[str, Any]:
    """Buckets in which anything was counted."""
    chosen = columns.is_some(buckets.facts)
    facts = buckets.facts[chosen]
    requests = np.where(facts["requests"] > 0, facts["requests"], np.nan)
    return {
        **buckets.series(chosen),
        "percentage": 100.0 * facts["errors"] / requests,  # not a number is rendered as null
        "request_count": _column(facts, "requests"),
        "error_count": _column(facts, "errors"),
        "cancelled_count": _known(facts, "cancelled"),
        "refused_count": _known(facts, "refused"),
        "error_callers": _known(facts, "error_callers"),
    }


def _known(facts: Records, name: str) -> NDArray[Any] | list[int | None]:
    """A column, with null where requests were recorded before it was counted."""
    column, is_unknown = _column(facts, name), facts["uncounted"] > 0
    if not is_unknown.any():
        return column
    pairs = zip(column.tolist(), is_unknown, strict=True)
    return [None if unknown else count for count, unknown in pairs]


def _token_usage(buckets: Buckets) -> dict[str, Any]:
    facts = buckets.facts
    return {
        **buckets.series(slice(None)),
        "total": facts["input"] + facts["output"],
        "input": _column(facts, "input"),
        "output": _column(facts, "output"),
        "empty_count": _column(facts, "empty"),
    }


def _latency_summary(buckets: Buckets) -> dict[str, Any]:
    total = buckets.total[0]
    count = int(total["requests"] - total["errors"])
    if not count:
        return {"average": None, **dict.fromkeys(QUANTILES)}
    return {
        "average": float(total["latency_sum_ms"]) / count,
        **{name: float(total[name]) for name in QUANTILES},
    }


def _throughput_summary(buckets: Buckets) -> dict[str, Any]:
    return {"average_requests_per_second": int(buckets.total[0]["requests"]) / len(buckets.summed)}


def _error_rate_summary(buckets: Buckets) -> dict[str, Any]:
    requests, errors = (int(buckets.total[0][name]) for name in ("requests", "errors"))
    return {
        "average_percentage": 100.0 * errors / requests if requests else 0.0,
        "request_count": requests,
        "error_count": errors,
    }


def _token_usage_summary(buckets: Buckets) -> dict[str, Any]:
    read, written = (int(buckets.total[0][name]) for name in ("input", "output"))
    return {"total": read + written, "input": read, "output": written}


Rendered = Mapping[MetricName, Callable[[Buckets], dict[str, Any]]]
SERIES: Rendered = {
    "latency": _latency,
    "throughput": _throughput,
    "error_rate": _error_rate,
    "token_usage": _token_usage,
}
SUMMARY: Rendered = {
    "latency": _latency_summary,
    "throughput": _throughput_summary,
    "error_rate": _error_rate_summary,
    "token_usage": _token_usage_summary,
}
