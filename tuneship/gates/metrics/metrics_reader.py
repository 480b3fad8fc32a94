"""Reads two deployments' metrics (§4.5, with or without the extension arrays) into a `RolloutSeries`.

The contract's models say what an answer looks like; here it is checked that its numbers can be counted. What cannot be
counted, or contradicts itself, is `Unusable` (a missing look), never another exception and never zero. A bucket that
contradicts itself and is followed by a sound one is left out, so that it is no evidence and stops nothing for ever.
Absent, null and zero all read as "no requests".
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, cast

from pydantic import ConfigDict, ValidationError

from tuneship.contract.common import Reply
from tuneship.contract.metrics import (
    CellCounts,
    DeploymentMetrics,
    InFlight,
    LatencySeries,
    MetricSeries,
    Series,
)
from tuneship.gates.metrics.series import (
    ARMS,
    Arm,
    ArmTraffic,
    Bucket,
    InFlightAges,
    RolloutSeries,
    Unusable,
)
from tuneship.gates.plan import interval_seconds
from tuneship.gates.statistics.cells import NO_CELLS, PER_DOUBLING, Cells

# Counts that older servers do not publish. In an array that is published, a bucket without a row had none.
_CALLER_COUNTS: Final = (
    *("cancelled_count", "refused_count", "error_callers"),
    *("cancelled_callers", "refused_callers"),
)
# Requests that our service leaves out for the gates, by what they are counted as.
_REPEATED: Final = tuple(
    f"repeated_{kind}" for kind in ("requests", "errors", "empty", "cancelled", "refused")
)
# The columns that are counted, by metric.
_COLUMNS: Final = {
    "throughput": ("requests_per_second",),
    "error_rate": ("percentage", "request_count", "error_count", *_CALLER_COUNTS),
    "latency": ("p50", "p95", "p99"),
    "token_usage": ("output", "empty_count"),
    "traffic": ("spread_keys", "callers_of_half", "replicas", *_REPEATED),
}
# The columns of counts by cell, by metric.
_CELLS: Final = {"latency": ("cells", "cells_per_token"), "token_usage": ("cells",)}
_TIMED: Final = {"histogram", *_CELLS["latency"]}
# Far above any count, and every whole number below it is exact as a float.
_MAX_NUMBER: Final = 1e15
# The cell of 2^64: no time and no number of tokens is larger.
_LAST_CELL: Final = 64 * PER_DOUBLING
_NO_TRAFFIC: Final = ArmTraffic()


class MetricsAnswer(Reply):
    """The parts of `DeploymentMetrics` that the gates read, so that an answer may lack the others."""

    model_config = ConfigDict(from_attributes=True)

    end_time: datetime
    interval: str | None = None
    metrics: MetricSeries | None = None
    in_flight: InFlight | None = None


# One deployment's metrics: as the client returns them, or as plain JSON from a file.
Metrics = DeploymentMetrics | Mapping[str, Any]
_Row = Mapping[str, Any]


def read_series(
    baseline: Metrics | None,
    candidate: Metrics | None,
    interval: str,
    counted_until: datetime | None = None,
) -> RolloutSeries:
    """Join both deployments' answers to `GET .../metrics`; None is a call that failed.

    Raises `Unusable`, also where the newest bucket contradicts itself. A bucket counts once both answers call it
    finished; buckets that ended by `counted_until` are not read again.
    """
    seconds = interval_seconds(interval)
    arms: dict[Arm, _ArmCounts] = {
        "baseline": _count(baseline, seconds, "baseline"),
        "candidate": _count(candidate, seconds, "candidate"),
    }
    # A bucket that only one answer calls finished may still grow in the other, and what a look has
    # counted must never change.
    limit = min(counts.finished_until for counts in arms.values())
    length = timedelta(seconds=seconds)
    buckets: list[Bucket] = []
    problem: str | None = None
    for start in sorted({start for counts in arms.values() for start in counts.traffic}):
        end = start + length
        if end > limit or (counted_until is not None and end <= counted_until):
            continue
        found = [arms[arm].traffic.get(start, _NO_TRAFFIC) for arm in ARMS]
        problem = _problem(start, found)
        if problem is None:
            buckets.append(Bucket(end, *cast("list[ArmTraffic]", found)))
    # A later look reads the newest bucket again: by then its counts may be sound.
    if problem is not None:
        raise Unusable(problem)

    return RolloutSeries(
        buckets=tuple(buckets),
        at=max(counts.end_time for counts in arms.values()),
        newest={arm: start + length if (start := arms[arm].newest) else None for arm in ARMS},
        edges_ms={arm: arms[arm].edges_ms for arm in ARMS},
        in_flight={arm: arms[arm].in_flight for arm in ARMS},
    )


def _problem(start: datetime, found: Sequence[ArmTraffic | str]) -> str | None:
    """Say why a bucket cannot be counted, with its arm and time; None if it can."""
    for arm, traffic in zip(ARMS, found, strict=True):
        if isinstance(traffic, str):
            return f"the counts of the {arm} at {start:%H:%M:%S} contradict each other: {traffic}"
    # One arm without requests may have null; both at once mean that the service does not know.
    if all(isinstance(traffic, ArmTraffic) and traffic.unvalued for traffic in found):
        return f"throughput is null in both deployments at {start:%H:%M:%S}"
    return None


def read_answer(answer: Metrics) -> MetricsAnswer:
    """Check the answer against the contract. Raises `Unusable`, without the answer's own text."""
    # Pydantic would take text and flags for numbers, and numbers for times.
    if isinstance(answer, Mapping):
        if not isinstance(answer.get("end_time"), str):
            raise Unusable("end_time is no time")
        metrics = answer.get("metrics")
        for series in cast("_Row", metrics).values() if isinstance(metrics, Mapping) else ():
            for name, values in cast("_Row", series).items() if isinstance(series, Mapping) else ():
                wrong = (int, float) if name == "timestamps" else (str, bool)
                column = cast("list[Any]", values) if isinstance(values, list) else []
                if name != "complete" and any(isinstance(value, wrong) for value in column):
                    raise Unusable(f"{name} holds a value of another type")
    try:
        return MetricsAnswer.model_validate(answer)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
        raise Unusable(f"{place}: {problem['msg']}") from None


@dataclass(frozen=True)
class _ArmCounts:
    """The counts of one deployment's answer. A bucket that cannot be counted has the reason instead."""

    traffic: Mapping[datetime, ArmTraffic | str]
    edges_ms: tuple[float, ...] | None
    end_time: datetime
    finished_until: datetime
    newest: datetime | None
    in_flight: InFlightAges | None


def _count(given: Metrics | None, seconds: int, arm: Arm) -> _ArmCounts:
    if given is None:
        raise Unusable(f"no metrics of the {arm}")
    answer = read_answer(given)
    _check_interval(answer.interval, seconds)
    metrics = answer.metrics or MetricSeries()
    # The four metrics may leave out different buckets: they are joined by time, not by position.
    rows = {name: _rows(name, getattr(metrics, name)) for name in _COLUMNS}
    errors, latency = metrics.error_rate, metrics.latency
    published = {
        name for name in _COLUMNS["error_rate"] if errors and getattr(errors, name) is not None
    }
    published |= {name for name in _TIMED if latency and getattr(latency, name) is not None}
    published |= {name for name in rows if getattr(metrics, name) is not None}
    starts = {start for metric in rows.values() for start in metric}
    unfinished = [
        start for metric in rows.values() for start, row in metric.items() if not row["complete"]
    ]
    end_time = _utc(answer.end_time)
    ages = answer.in_flight.ages_ms if answer.in_flight else None
    ages_ms = _edges(ages.le) if ages else ()
    return _ArmCounts(
        traffic={
            start: _traffic(
                {name: metric.get(start, {}) for name, metric in rows.items()}, seconds, published
            )
            for start in starts
        },
        edges_ms=_edges(latency.histogram.le) if latency and latency.histogram else None,
        end_time=end_time,
        finished_until=min([end_time, *unfinished]),
        newest=max(
            (s for s, row in rows["throughput"].items() if row["requests_per_second"] is not None),
            default=None,
        ),
        in_flight=InFlightAges(ages_ms, _cumulative(ages.counts, len(ages_ms))) if ages else None,
    )


def _rows(metric: str, series: Series | None) -> dict[datetime, _Row]:
    """One metric by bucket start, in any order. A repeated bucket is marked as such."""
    if series is None:
        return {}
    stamps = series.timestamps or []
    columns: dict[str, Sequence[Any]] = {}
    for name in _COLUMNS[metric]:
        values: Sequence[float | None] | None = getattr(series, name)
        columns[name] = [None] * len(stamps) if values is None else _numbers(values, name)
    if isinstance(series, LatencySeries):
        histogram = series.histogram
        edges = len(_edges(histogram.le)) if histogram else 0
        columns["histogram"] = (
            [_cumulative(counts, edges) for counts in histogram.counts]
            if histogram
            else [None] * len(stamps)
        )
    for name in _CELLS.get(metric, ()):
        counts: CellCounts | None = getattr(series, name)
        columns[name] = [None] * len(stamps) if counts is None else _cells(counts, name)
    columns["complete"] = [True] * len(stamps) if series.complete is None else series.complete

    for name, column in columns.items():
        if len(column) != len(stamps):
            raise Unusable(f"{name} is not as long as its timestamps")
    rows: dict[datetime, _Row] = {}
    for i, stamp in enumerate(stamps):
        start, row = _utc(stamp), {name: column[i] for name, column in columns.items()}
        if start in rows:
            row["complete"] = row["complete"] and rows[start]["complete"]
            row["twice"] = True
        rows[start] = row
    return rows


def _cells(counts: CellCounts, name: str) -> list[Cells | None]:
    if counts.per_doubling != PER_DOUBLING:
        raise Unusable(f"{name} are of another width")
    if len(counts.index) != len(counts.count):
        raise Unusable(f"{name} has not as many counts as indexes")
    return [
        None if index is None or count is None else _cells_of_bucket(index, count, name)
        for index, count in zip(counts.index, counts.count, strict=True)
    ]


def _cells_of_bucket(index: Sequence[int], count: Sequence[int], name: str) -> Cells:
    if len(index) != len(count):
        raise Unusable(f"{name} has not as many counts as indexes")
    if list(index) != sorted(set(index)):
        raise Unusable(f"{name} must rise")
    if index and not -_LAST_CELL <= index[0] <= index[-1] <= _LAST_CELL:
        raise Unusable(f"{name} holds a cell out of range")
    if count and not 0 < min(count) <= max(count) <= _MAX_NUMBER:
        raise Unusable(f"{name} holds a count out of range")
    return Cells(tuple(index), tuple(count))


def _traffic(row: Mapping[str, _Row], seconds: int, published: Set[str]) -> ArmTraffic | str:
    """Count one bucket from its rows in the four metrics, or say why it cannot be counted."""
    for metric, found in row.items():
        if "twice" in found:
            return f"two rows for one bucket in {metric}"
    errors, latency, usage = row["error_rate"], row["latency"], row["token_usage"]
    rate = row["throughput"].get("requests_per_second")
    # Counts are exact. Those of a server that publishes a rate and a percentage only are worked out,
    # and rounded back to the whole numbers that they came from.
    if "request_count" in published:
        requests, failed = int(errors.get("request_count") or 0), errors.get("error_count")
    else:
        requests, share = _rounded((rate or 0.0) * seconds), errors.get("percentage")
        failed = None if share is None else _rounded(share / 100.0 * requests)
    # A share of nothing is null, and says nothing against the bucket.
    if not requests:
        failed = 0
    if failed is None:
        return "requests without their share of errors"
    failed = int(failed)
    if failed > requests:
        return "more errors than requests"
    cancelled, refused, *callers = (
        int(count) if name in published and (count := errors.get(name, 0)) is not None else None
        for name in _CALLER_COUNTS
    )
    empty = None if (empty := usage.get("empty_count")) is None else int(empty)
    repeats = [int(row["traffic"].get(name) or 0) for name in _REPEATED]
    counted, counts = requests, [requests, failed, empty, cancelled, refused]
    if any(few > (many or 0) for few, many in zip(repeats, counts, strict=True)):
        return "more repeats than requests"
    requests, failed = requests - repeats[0], failed - repeats[1]
    empty, cancelled, refused = (
        None if count is None else count - repeated
        for count, repeated in zip(counts[2:], repeats[2:], strict=True)
    )
    if problem := _contradiction(row, counted, requests - failed, seconds, published):
        return problem
    p50, p95, p99 = (latency.get(name) for name in _COLUMNS["latency"])
    spread_keys, callers_of_half, replicas = (
        None if (number := row["traffic"].get(name)) is None else int(number)
        for name in ("spread_keys", "callers_of_half", "replicas")
    )
    error_callers, cancelled_callers, refused_callers = (
        # An estimate may be off: at least one caller, and no more than there were requests.
        None if number is None else min(max(number, 1), most or 0)
        for number, most in zip(callers, (failed, cancelled, refused), strict=True)
    )
    return ArmTraffic(
        requests=requests,
        errors=failed,
        empty=empty,
        output_tokens=usage.get("output"),
        quantiles_ms=None if p50 is None or p95 is None or p99 is None else (p50, p95, p99),
        histogram=latency.get("histogram"),
        unvalued=bool(row["throughput"]) and rate is None,
        cancelled=cancelled,
        refused=refused,
        error_callers=error_callers,
        cells=_counted_cells(latency, "cells", published),
        cells_per_token=_counted_cells(latency, "cells_per_token", published),
        token_cells=usage.get("cells"),
        cancelled_callers=cancelled_callers,
        refused_callers=refused_callers,
        spread_keys=spread_keys,
        callers_of_half=callers_of_half,
        replicas=replicas,
    )


def _counted_cells(latency: _Row, name: str, published: Set[str]) -> Cells | None:
    """Counts by cell. A bucket without a row in a latency that is published had no answer."""
    return latency.get(name, NO_CELLS if name in published else None)


def _contradiction(
    row: Mapping[str, _Row], requests: int, answered: int, seconds: int, published: Set[str]
) -> str | None:
    """The first contradiction between the metrics of one bucket; `answered`: without errors and repeats."""
    throughput, latency, usage = row["throughput"], row["latency"], row["token_usage"]
    rate = throughput.get("requests_per_second")
    # A rate that is null is not known.
    served = requests if rate is None else rate * seconds
    histogram = latency.get("histogram")
    timed = None if histogram is None else histogram[-1]
    cells: list[Cells | None] = [
        *(latency.get(name) for name in _CELLS["latency"]),
        *(usage.get(name) for name in _CELLS["token_usage"]),
    ]
    totals = [None if one is None else one.total for one in cells]
    is_counted, is_timed = "request_count" in published, not published.isdisjoint(_TIMED)
    empty = usage.get("empty_count") or 0
    problems = {
        "more blank answers than answers": empty
        > answered + (row["traffic"].get("repeated_empty") or 0),
        "answers in latency or token_usage that did not succeed": any(
            total is not None and total > answered for total in (timed, *totals)
        ),
        "other answers in the histogram of latency than in its cells": (
            None not in (timed, totals[0]) and timed != totals[0]
        ),
        "requests in error_rate that are not in throughput": (
            is_counted and requests > 0 and "throughput" in published and not throughput
        ),
        "requests in throughput that are not in error_rate": (
            is_counted and _rounded(served) > 0 and not row["error_rate"]
        ),
        "other numbers of requests in throughput and error_rate": (
            is_counted and abs(served - requests) > max(1.0, 0.01 * max(served, requests))
        ),
        "requests in error_rate that are not in latency": answered > 0 and is_timed and not latency,
        "requests in error_rate that are not in token_usage": (
            is_counted and answered > 0 and "token_usage" in published and not usage
        ),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def _numbers(values: Sequence[float | None], name: str) -> list[float | None]:
    highest = 100.0 if name == "percentage" else _MAX_NUMBER
    if any(value is not None and not 0 <= value <= highest for value in values):
        raise Unusable(f"{name} holds a number out of range")
    return [None if value is None else float(value) for value in values]


def _cumulative(counts: Sequence[int], length: int) -> tuple[int, ...]:
    if len(counts) != length:
        raise Unusable("histogram is not as long as its edges")
    if list(counts) != sorted(counts) or counts[0] < 0 or counts[-1] > _MAX_NUMBER:
        raise Unusable("histogram is not cumulative")
    return tuple(counts)


def _edges(le: Sequence[float | None]) -> tuple[float, ...]:
    """The upper edges in ms, the last of them infinite."""
    edges = [math.inf if edge is None else edge for edge in _numbers(le, "le")]
    if edges[-1:] != [math.inf] or math.inf in edges[:-1]:
        raise Unusable("histogram.le must end with its only null")
    if any(a >= b for a, b in pairwise(edges)):
        raise Unusable("histogram.le must rise")
    return tuple(edges)


def _rounded(value: float) -> int:
    """Round half up, where Python's `round` goes to the even number."""
    return math.floor(value + 0.5)


def _utc(moment: datetime | None) -> datetime:
    """The time in UTC, to the second as the service writes it; a time without an offset is UTC."""
    if moment is None:
        raise Unusable("a timestamp is null")
    try:
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return aware.astimezone(UTC).replace(microsecond=0)
    except OverflowError as error:
        raise Unusable("a time is out of range") from error


def _check_interval(answered: str | None, seconds: int) -> None:
    """Refuse other buckets than requested: bare counts are rate x interval and would be wrong."""
    # A server that writes its intervals otherwise, or not at all, is believed.
    try:
        answered_seconds = interval_seconds(answered) if answered else seconds
    except ValueError:
        return
    if answered_seconds != seconds:
        raise Unusable(f"requested buckets of {seconds} s, received {answered}")
