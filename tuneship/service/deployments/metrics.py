"""Handler of deployment metrics: reads windows, merges them into the requested interval and renders columns.

The answer may have 50,000 points, so it is rendered from arrays, not from models; a test compares it with the contract.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray

from tuneship.contract import metrics as contract
from tuneship.contract.common import render_time
from tuneship.contract.metrics import METRIC_NAMES, MetricName
from tuneship.metrics import columns
from tuneship.metrics.columns import EDGES_MS, FACTS, QUANTILES, Columns, Records, Whole
from tuneship.metrics.windows import CELLS_PER_DOUBLING
from tuneship.service.answers.field_errors import field_error, refuse_times_out_of_range
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.deployments.lookup import own_deployment
from tuneship.service.endpoints.lookup import own_endpoint
from tuneship.service.telemetry.in_flight import AGES_MS
from tuneship.service.telemetry.record_keeper import store_metrics
from tuneship.store.cluster import member_ages
from tuneship.store.cluster.member_sessions import ALONE
from tuneship.store.records import metric_windows
from tuneship.store.records.metric_windows import EVERY, MINUTE, SECOND, WIDTHS, WindowSource

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# A month by minutes has 43,200 points.
MAX_POINTS = 50_000
# Cells and what else is not in the records of an hour's minutes: two weeks by minutes.
MAX_FINE_POINTS = 20_160
# A bucket can still change for this long after its end: the recorder stores several times a second.
INGESTION_LAG_S = 1.0
DEFAULT_SPAN = timedelta(hours=1)
RENDERING = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Buckets:
    """Every bucket of one answer: `facts[i]` starts at `starts[i]` (epoch seconds); an empty one is all zeros."""

    interval_s: int
    starts: Whole
    facts: Records
    # The windows of the buckets, empty ones left out; None where too many were asked for.
    fine: Columns | None
    # The row of each bucket in `fine`, -1 for an empty one.
    rows: Whole
    # One record: the counts of the seconds in `summed`.
    total: Records
    # Epoch seconds of the summary.
    summed: range
    now: float

    def series(self, chosen: Mask | slice) -> dict[str, Any]:
        """The fields that every series has."""
        starts = self.starts[chosen]
        return {
            "timestamps": starts.astype("datetime64[s]"),
            "complete": starts + (self.interval_s + INGESTION_LAG_S) <= self.now,
        }

    def cells(self, chosen: Mask | slice, name: str) -> dict[str, Any] | None:
        """The counts by cell of the chosen buckets."""
        if self.fine is None:
            return None
        is_sketch = name == "latencies"
        merged = columns.cells(getattr(self.fine, name), is_sketch=is_sketch)
        rows: list[int] = self.rows[chosen].tolist()
        # An empty bucket has the last row, which is empty as well.
        found: list[Any] = [*merged.rows(), np.zeros(0, merged.values.dtype)]
        series: list[Any] = [found[row] for row in rows]
        return {
            "per_doubling": CELLS_PER_DOUBLING,
            **{column: [one[column].tolist() for one in series] for column in ("index", "count")},
        }

    def finer(
        self, chosen: Mask, numbers: Callable[[Columns], Sequence[int]]
    ) -> Sequence[int | None]:
        """Detailed counts of the chosen buckets, one row each; null where only wider windows are stored."""
        if self.fine is None:
            return [None] * int(np.count_nonzero(chosen))
        found, rows = numbers(self.fine), cast("list[int]", self.rows[chosen].tolist())
        return [found[row] for row in rows]


@serves(contract.get_deployment_metrics)
def get_deployment_metrics(  # noqa: PLR0913 - the description's own query parameters
    context: Context,
    deployment_id: str,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    metrics: list[MetricName] | None = None,
    interval: str = "1m",
    endpoint_id: str | None = None,
) -> bytes:
    """The series and summaries of a deployment's metrics, as JSON."""
    refuse_times_out_of_range(start_time=start_time, end_time=end_time)
    end = (end_time or context.now).astimezone(UTC)
    start = (start_time or end - DEFAULT_SPAN).astimezone(UTC)
    starts = _bucket_starts(start, end, interval)
    own_deployment(context, deployment_id)
    if endpoint_id is not None:
        own_endpoint(context, endpoint_id)

    parts = context.parts
    store_metrics(parts.recorder, parts.database, parts.clock, parts.member_number)
    now = context.now.timestamp()
    summed = _summary_seconds(start, end, now)
    source = WindowSource(deployment_id, endpoint_id or EVERY)
    with context.read() as connection:
        buckets = _read_buckets(connection, source, starts, summed, now)
        has_in_flight = end_time is None or end.timestamp() >= now
        in_flight = _in_flight(context, connection, source, starts.step) if has_in_flight else None
    chosen: list[MetricName] = [name for name in METRIC_NAMES if name in (metrics or METRIC_NAMES)]
    answer: dict[str, Any] = {
        "deployment_id": deployment_id,
        "start_time": render_time(start),
        "end_time": render_time(end),
        "interval": interval,
        "metrics": {name: SERIES[name](buckets) for name in chosen},
        "summary": {name: SUMMARY[name](buckets) for name in chosen if name in SUMMARY},
        "summary_start_time": render_time(datetime.fromtimestamp(summed.start, UTC)),
        "summary_end_time": render_time(datetime.fromtimestamp(summed.stop, UTC)),
        "generate_timeout_seconds": context.parts.settings.generate_timeout_s,
    }
    if in_flight is not None:
        answer["in_flight"] = in_flight
    return orjson.dumps(answer, option=RENDERING)


def _in_flight(
    context: Context, connection: sa.Connection, source: WindowSource, interval_s: int
) -> dict[str, Any]:
    """The ages of requests in flight at this member and at those that have reported theirs recently."""
    parts, deployment = context.parts, source.deployment_id
    members: list[Mapping[str, list[int]]] = [parts.in_flight.ages(deployment)]
    if parts.member_number != ALONE:
        # A request that has ended since then may be in the newest complete bucket, and would count twice.
        finished = (context.now.timestamp() - INGESTION_LAG_S) // interval_s * interval_s
        since = datetime.fromtimestamp(finished, UTC)
        others = member_ages.of_others(connection, parts.member_number, since)
        members += [other["ages"].get(deployment, {}) for other in others]
    total = np.zeros(len(AGES_MS) + 1, np.int64)
    for ages in members:
        for endpoint_id, counts in ages.items():
            if source.endpoint_id in (EVERY, endpoint_id):
                total += counts
    at_most = total.cumsum()
    ages_ms = {"le": [*AGES_MS, None], "counts": at_most}
    return {"requests": int(at_most[-1]), "ages_ms": ages_ms}


def _bucket_starts(start: datetime, end: datetime, interval: str) -> range:
    """The starts of the buckets in epoch seconds: multiples of the interval, up to the bucket that ends at `end`."""
    if start >= end:
        raise field_error("start_time", "must be before end_time")
    interval_s = int(interval[:-1]) * UNIT_SECONDS[interval[-1]]
    if interval_s > UNIT_SECONDS["d"]:
        raise field_error("interval", "must be at most 1d")
    first = int(start.timestamp()) // interval_s * interval_s
    count = -int((first - end.timestamp()) // interval_s)
    if count > MAX_POINTS:
        raise field_error("interval", f"gives {count} points, at most {MAX_POINTS} are answered")
    return range(first, first + count * interval_s, interval_s)


def _summary_seconds(start: datetime, end: datetime, now: float) -> range:
    """The span of the summary: the seconds that [start, end) touches.

    Where single seconds are no longer kept, it grows to the whole minutes that the span touches: their counts cannot be
    divided, and a longer span's counts must never be shown as those of a shorter one.
    """
    known = metric_windows.oldest(SECOND, now)
    first, last = math.floor(start.timestamp()), math.ceil(end.timestamp())
    if first < known:
        first -= first % MINUTE
    if last < known:
        last += -last % MINUTE
    return range(first, last)


def _read_buckets(
    connection: sa.Connection, source: WindowSource, starts: range, summed: range, now: float
) -> Buckets:
    # The widest windows that fit into the buckets are the fewest to read.
    width = max(width for width in WIDTHS if starts.step % width == 0)
    if width == SECOND:
        # Single seconds are kept for two days: a gap where there was traffic would be a lie.
        known = metric_windows.oldest(SECOND, now)
        lost = (starts.start // 60 * 60, min(known, starts.stop))
        if starts.start < known and metric_windows.has_traffic(connection, source, *lost):
            raise field_error(
                "interval", "must be whole minutes: the time reaches back over 2 days"
            )

    span = (starts.start, starts.stop)
    fine: Columns | None = None
    if width == starts.step and len(starts) > MAX_FINE_POINTS:
        filled, facts = metric_windows.facts(connection, source, width, *span)
    else:
        filled, fine = metric_windows.sketches(connection, source, width, *span)
        if width != starts.step:
            filled, fine = columns.grouped(fine, filled // starts.step * starts.step)
        facts = fine.facts
    every = np.zeros(len(starts), FACTS)
    places = (filled - starts.start) // starts.step
    every[places] = facts
    rows = np.full(len(starts), -1)
    rows[places] = np.arange(len(places))

    whole = metric_windows.whole(connection, source, summed.start, summed.stop)
    _, total = columns.grouped(whole, np.zeros(len(whole), np.int64))
    return Buckets(
        interval_s=starts.step,
        starts=np.arange(starts.start, starts.stop, starts.step),
        facts=every,
        fine=fine if len(starts) <= MAX_FINE_POINTS else None,
        rows=rows,
        total=total.facts if len(total) else np.zeros(1, FACTS),
        summed=summed,
        now=now,
    )


def latency_series(buckets: Buckets) -> dict[str, Any]:
    """Latencies of the buckets with successful requests. NaN, where all are of batches, becomes null."""
    chosen: Mask = buckets.facts["requests"] > buckets.facts["errors"]
    facts = buckets.facts[chosen]
    counts = columns.timed_requests(facts)
    timed = np.where(counts > 0, counts, np.nan)
    return {
        **buckets.series(chosen),
        "average": facts["latency_sum_ms"] / timed,
        **{name: np.where(counts > 0, facts[name], np.nan) for name in QUANTILES},
        "histogram": {"le": [*EDGES_MS, None], "counts": _column(facts, "histogram")},
        "cells": buckets.cells(chosen, "latencies"),
        "cells_per_token": buckets.cells(chosen, "per_token"),
    }


def _column(facts: Records, name: str) -> NDArray[Any]:
    # The renderer accepts contiguous arrays only.
    return np.ascontiguousarray(facts[name])


def throughput_series(buckets: Buckets) -> dict[str, Any]:
    """Requests per second of every bucket."""
    return {
        **buckets.series(slice(None)),
        "requests_per_second": buckets.facts["requests"] / buckets.interval_s,
    }


def error_rate_series(buckets: Buckets) -> dict[str, Any]:
    """Error rates of the buckets with any count."""
    chosen = columns.is_some(buckets.facts)
    facts = buckets.facts[chosen]
    requests = np.where(facts["requests"] > 0, facts["requests"], np.nan)
    return {
        **buckets.series(chosen),
        "percentage": 100.0 * facts["errors"] / requests,  # NaN is rendered as null
        "request_count": _column(facts, "requests"),
        "error_count": _column(facts, "errors"),
        "cancelled_count": _column(facts, "cancelled"),
        "refused_count": _column(facts, "refused"),
        "error_callers": _column(facts, "error_callers"),
        **{name: buckets.finer(chosen, _of_more(name)) for name in columns.CALLERS[1:]},
    }


def _of_more(name: str) -> Callable[[Columns], list[int]]:
    return lambda windows: windows.more[name].tolist()


def traffic_series(buckets: Buckets) -> dict[str, Any]:
    """Traffic facts of the buckets with any count."""
    chosen = columns.is_some(buckets.facts)
    replicas = buckets.finer(chosen, _of_more("replicas"))
    return {
        **buckets.series(chosen),
        "spread_keys": buckets.finer(chosen, _of_more("spread_keys")),
        "callers_of_half": buckets.finer(chosen, columns.callers_of_half),
        # No request of the bucket found a running replica, or knew of one.
        "replicas": [number or None for number in replicas],
        **{name: buckets.finer(chosen, _of_more(name)) for name in columns.REPEATED},
    }


def token_usage_series(buckets: Buckets) -> dict[str, Any]:
    """Tokens of every bucket."""
    facts = buckets.facts
    return {
        **buckets.series(slice(None)),
        "total": facts["input"] + facts["output"],
        "input": _column(facts, "input"),
        "output": _column(facts, "output"),
        "empty_count": _column(facts, "empty"),
        "cells": buckets.cells(slice(None), "answer_tokens"),
    }


def latency_summary(buckets: Buckets) -> dict[str, Any]:
    """The average and the quantiles of the timed requests; null if none was timed."""
    total = buckets.total[0]
    (count,) = columns.timed_requests(buckets.total).tolist()
    if not count:
        return {"average": None, **dict.fromkeys(QUANTILES)}
    return {
        "average": float(total["latency_sum_ms"]) / count,
        **{name: float(total[name]) for name in QUANTILES},
    }


def throughput_summary(buckets: Buckets) -> dict[str, Any]:
    """Requests per second over the whole span."""
    return {"average_requests_per_second": int(buckets.total[0]["requests"]) / len(buckets.summed)}


def error_rate_summary(buckets: Buckets) -> dict[str, Any]:
    """The share of failed requests in per cent; 0 without requests."""
    requests, errors = (int(buckets.total[0][name]) for name in ("requests", "errors"))
    return {
        "average_percentage": 100.0 * errors / requests if requests else 0.0,
        "request_count": requests,
        "error_count": errors,
    }


def token_usage_summary(buckets: Buckets) -> dict[str, Any]:
    """Tokens of the whole span."""
    read, written = (int(buckets.total[0][name]) for name in ("input", "output"))
    return {"total": read + written, "input": read, "output": written}


Renderers = Mapping[MetricName, Callable[[Buckets], dict[str, Any]]]
SERIES: Renderers = {
    "latency": latency_series,
    "throughput": throughput_series,
    "error_rate": error_rate_series,
    "token_usage": token_usage_series,
    "traffic": traffic_series,
}
SUMMARY: Renderers = {
    "latency": latency_summary,
    "throughput": throughput_summary,
    "error_rate": error_rate_summary,
    "token_usage": token_usage_summary,
}
