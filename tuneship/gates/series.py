"""Two deployments' metrics answers (§4.5, with or without the extension arrays) -> finished buckets, joined by time.

Takes the raw JSON, because a bare server may send anything: what cannot be counted is `Unusable` (a missing look),
never another exception and never zero. Absent, null and zero all read as "no requests". Knows no gate and no rollout.
Next: `tallies.py` counts for the gates, `frames.py` shows a series as a pandas frame.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Literal, cast

from tuneship.gates.plan import interval_seconds

Arm = Literal["baseline", "candidate"]
ARMS: Final[tuple[Arm, Arm]] = ("baseline", "candidate")
Json = Mapping[str, Any]

_FIELDS: Final = {
    "throughput": ("requests_per_second",),
    "error_rate": (
        "percentage",
        "request_count",
        "error_count",
        "cancelled_count",
        "refused_count",
        "error_callers",
    ),
    "latency": ("p50", "p95", "p99"),
    "token_usage": ("output", "empty_count"),
}
# Counts that older servers keep to themselves; a bucket without a row in a published array had
# none.
_OF_CALLERS: Final = ("cancelled_count", "refused_count", "error_callers")
_WHOLE: Final = frozenset(
    {"request_count", "error_count", "empty_count", "histogram", "in_flight", *_OF_CALLERS}
)
_MOST: Final = 1e15  # far above any count, and every whole number below it is exact


class Unusable(Exception):
    """The answer cannot be counted; the message says why. The look is a missing one."""


@dataclass(frozen=True, slots=True)
class ArmTraffic:
    """One deployment in one bucket. None means "not published"."""

    requests: int = 0
    errors: int = 0
    empty: int | None = None
    output_tokens: float | None = None
    quantiles_ms: tuple[float, float, float] | None = None
    """p50, p95, p99 of the successful requests."""
    histogram: tuple[int, ...] | None = None
    """Successful requests at or below each edge of `Series.edges_ms`."""
    unvalued: bool = False
    """The throughput entry was null."""
    cancelled: int | None = field(default=None, repr=False)
    """Callers who hung up before their answer ended; none of `requests`."""
    refused: int | None = field(default=None, repr=False)
    """Requests that the deployment itself refused (too long a prompt, ...); none of `requests`."""
    error_callers: int | None = field(default=None, repr=False)
    """Distinct callers among the errors."""

    @property
    def of_callers(self) -> tuple[int | None, int | None, int | None]:
        """The counts that `repr` leaves out, because the digests of earlier records do not know them."""
        return self.cancelled, self.refused, self.error_callers

    @property
    def served(self) -> int:
        """Requests that were answered."""
        return self.histogram[-1] if self.histogram else self.requests - self.errors


@dataclass(frozen=True, slots=True)
class Bucket:
    """One finished bucket of both deployments."""

    end: datetime
    baseline: ArmTraffic
    candidate: ArmTraffic

    def __getitem__(self, arm: Arm) -> ArmTraffic:
        return self.baseline if arm == "baseline" else self.candidate


@dataclass(frozen=True, slots=True)
class InFlightAges:
    """Requests of one deployment that are still being answered at `Series.at`: how many have which age at most."""

    edges_ms: tuple[float, ...]
    counts: tuple[int, ...]

    def older_than(self, age_ms: float) -> list[tuple[float, float, int]]:
        """Requests that are certainly older than this: their least and greatest age, and how many."""
        first = bisect_left(self.edges_ms, age_ms)
        return [
            (self.edges_ms[i], self.edges_ms[i + 1], self.counts[i + 1] - self.counts[i])
            for i in range(first, len(self.counts) - 1)
            if self.counts[i + 1] > self.counts[i]
        ]


@dataclass(frozen=True)
class RolloutSeries:
    """What one look knows, by the service's clock: finished buckets, ascending, and how fresh each arm is."""

    buckets: tuple[Bucket, ...]
    at: datetime
    """The later `end_time` of the two answers."""
    newest: Mapping[Arm, datetime | None]
    """Per arm the end of the newest bucket with a throughput value, finished or not."""
    edges_ms: Mapping[Arm, tuple[float, ...] | None]
    counts_empty: bool
    """No arm that had requests keeps its `empty_count` to itself."""
    in_flight: Mapping[Arm, InFlightAges | None] = field(
        default_factory=dict[Arm, InFlightAges | None]
    )
    """What each arm is still answering; None: not published."""

    @property
    def horizon(self) -> datetime | None:
        """End of the newest finished bucket."""
        return self.buckets[-1].end if self.buckets else None

    def unvalued(self, arm: Arm, until: datetime | None) -> int:
        """Null throughput entries among the buckets that ended by `until`."""
        return sum(bucket[arm].unvalued for bucket in self.until(until))

    def until(self, horizon: datetime | None) -> tuple[Bucket, ...]:
        """The buckets that ended by `horizon`."""
        return self.buckets[: first_after(self.buckets, horizon)] if horizon else ()

    def digest(self) -> str:
        """SHA-256 of the finished buckets: equal digests, equal numbers."""
        edges = repr(sorted(self.edges_ms.items()))
        # The digests of earlier records were made when the class had the shorter name.
        buckets = repr(self.buckets).replace(f"{ArmTraffic.__name__}(", "Traffic(")
        text = f"({buckets}, {edges})"
        of_callers = [bucket[arm].of_callers for bucket in self.buckets for arm in ARMS]
        if any(counts != (None, None, None) for counts in of_callers):
            text += repr(of_callers)
        return hashlib.sha256(text.encode()).hexdigest()


def first_after(buckets: Sequence[Bucket], moment: datetime | None) -> int:
    """Index of the first bucket that ended after `moment` (None: of the first bucket)."""
    if moment is None:
        return 0
    return bisect_right(buckets, moment, key=lambda bucket: bucket.end)


def read_series(baseline: Json | None, candidate: Json | None, interval: str) -> RolloutSeries:
    """Join the answers to `GET .../metrics` of both deployments; None stands for a call that failed.

    Raises `Unusable`. A bucket counts once both answers call it finished.
    """
    seconds = interval_seconds(interval)
    arms: dict[Arm, _ArmAnswer] = {
        "baseline": _read_answer(baseline, seconds, "baseline"),
        "candidate": _read_answer(candidate, seconds, "candidate"),
    }
    limit = min(answer.finished_until for answer in arms.values())
    length = timedelta(seconds=seconds)
    starts = sorted({start for answer in arms.values() for start in answer.traffic})
    buckets = tuple(
        Bucket(start + length, *(arms[arm].counted(start) for arm in ARMS))
        for start in starts
        if start + length <= limit
    )
    if any(bucket.baseline.unvalued and bucket.candidate.unvalued for bucket in buckets):
        raise Unusable("throughput is null in both deployments")
    return RolloutSeries(
        buckets=buckets,
        at=max(answer.end_time for answer in arms.values()),
        newest={arm: start + length if (start := arms[arm].newest) else None for arm in ARMS},
        edges_ms={arm: arms[arm].edges_ms for arm in ARMS},
        counts_empty=not any(
            traffic.served > 0 and traffic.empty is None
            for bucket in buckets
            for traffic in (bucket.baseline, bucket.candidate)
        ),
        in_flight={arm: arms[arm].in_flight for arm in ARMS},
    )


@dataclass(frozen=True)
class _ArmAnswer:
    """One deployment's answer. A bucket that cannot be counted keeps its reason until somebody needs it."""

    traffic: Mapping[datetime, ArmTraffic | str]
    edges_ms: tuple[float, ...] | None
    end_time: datetime
    finished_until: datetime
    newest: datetime | None
    in_flight: InFlightAges | None

    def counted(self, start: datetime) -> ArmTraffic:
        traffic = self.traffic.get(start, _NOTHING)
        if isinstance(traffic, str):
            raise Unusable(traffic)
        return traffic


_NOTHING: Final = ArmTraffic()


def _read_answer(answer: Json | None, seconds: int, arm: Arm) -> _ArmAnswer:
    if answer is None:
        raise Unusable(f"no metrics of the {arm}")
    bodies = _mapping(answer.get("metrics"), "metrics")
    rows = {name: _rows(name, _mapping(bodies.get(name), name)) for name in _FIELDS}
    end_time = _moment(answer.get("end_time"))
    _check_interval(answer.get("interval"), seconds)
    error_rate = _mapping(bodies.get("error_rate"), "error_rate")
    published = frozenset(name for name in error_rate if error_rate[name] is not None)
    starts = {start for metric in rows.values() for start in metric}
    unfinished = [
        start for metric in rows.values() for start, row in metric.items() if not row["complete"]
    ]
    rates = {start: row["requests_per_second"] for start, row in rows["throughput"].items()}
    return _ArmAnswer(
        traffic={
            start: _traffic(
                {name: metric.get(start, {}) for name, metric in rows.items()}, seconds, published
            )
            for start in starts
        },
        edges_ms=_edges(_mapping(bodies.get("latency"), "latency")),
        end_time=end_time,
        finished_until=min([end_time, *unfinished]),
        newest=max((start for start, rate in rates.items() if rate is not None), default=None),
        in_flight=_in_flight(answer.get("in_flight")),
    )


def _traffic(row: Mapping[str, Json], seconds: int, published: frozenset[str]) -> ArmTraffic | str:
    """Counts of one bucket from its rows in the four metrics, or why they cannot be had."""
    errors, latency, usage = row["error_rate"], row["latency"], row["token_usage"]
    rate = row["throughput"].get("requests_per_second")
    if "request_count" in published:
        requests, failed = int(errors.get("request_count") or 0), errors.get("error_count")
    else:
        requests, share = _rounded((rate or 0.0) * seconds), errors.get("percentage")
        failed = None if share is None else _rounded(share / 100.0 * requests)
    if not requests:
        failed = 0
    if failed is None:
        return "requests without their share of errors"
    if failed > requests:
        return "more errors than requests"
    cancelled, refused, callers = (
        int(count) if name in published and (count := errors.get(name, 0)) is not None else None
        for name in _OF_CALLERS
    )
    p50, p95, p99 = (latency.get(name) for name in _FIELDS["latency"])
    return ArmTraffic(
        requests=requests,
        errors=int(failed),
        empty=None if (empty := usage.get("empty_count")) is None else int(empty),
        output_tokens=usage.get("output"),
        quantiles_ms=None if p50 is None or p95 is None or p99 is None else (p50, p95, p99),
        histogram=latency.get("histogram"),
        unvalued=bool(row["throughput"]) and rate is None,
        cancelled=cancelled,
        refused=refused,
        error_callers=None if callers is None else min(max(callers, 1), int(failed)),
    )


def _in_flight(snapshot: object) -> InFlightAges | None:
    """The requests that are still being answered, by age. None where the server does not publish them."""
    ages = _mapping(snapshot, "in_flight").get("ages_ms")
    if ages is None:
        return None
    edges = _edges({"histogram": ages})
    if edges is None:
        return None
    return InFlightAges(edges, _cumulative(_mapping(ages, "in_flight").get("counts"), len(edges)))


def _rows(name: str, body: Json) -> dict[datetime, Json]:
    """One metric by bucket start. Any order; of two entries for one bucket the last wins."""
    stamps = _list(body.get("timestamps"), "timestamps")
    columns: dict[str, Sequence[Any]] = {
        column: _numbers(body.get(column), len(stamps), column) for column in _FIELDS[name]
    }
    if name == "latency":
        columns["histogram"] = _histogram(body, len(stamps))
    flags = body.get("complete")
    columns["complete"] = (
        [True] * len(stamps) if flags is None else _array(flags, len(stamps), "complete")
    )
    return {
        _moment(stamp): {column: values[i] for column, values in columns.items()}
        for i, stamp in enumerate(stamps)
    }


def _histogram(body: Json, length: int) -> list[tuple[int, ...] | None]:
    edges = _edges(body)
    if edges is None:
        return [None] * length
    counts = _array(body["histogram"].get("counts"), length, "histogram")
    return [None if row is None else _cumulative(row, len(edges)) for row in counts]


def _cumulative(row: object, length: int) -> tuple[int, ...]:
    values = _array(row, length, "histogram")
    if not all(type(value) is int for value in values):  # ours are; others may be null or 3.0
        values = [int(count or 0) for count in _numbers(values, length, "histogram")]
    if values != sorted(values) or values[0] < 0 or values[-1] > _MOST:
        raise Unusable("histogram is not cumulative")
    return tuple(values)


def _edges(body: Json) -> tuple[float, ...] | None:
    if body.get("histogram") is None:
        return None
    edges = _list(_mapping(body["histogram"], "histogram").get("le"), "le")
    if not edges or edges[-1] is not None or None in edges[:-1]:
        raise Unusable("histogram.le must end with its only null")
    finite = [_number(edge, "le") for edge in edges[:-1]]
    if any(a >= b for a, b in pairwise(finite)):
        raise Unusable("histogram.le must rise")
    return (*finite, math.inf)


def _mapping(value: object, name: str) -> Json:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Unusable(f"{name} is no object")
    return cast("Json", value)


def _list(value: object, name: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Unusable(f"{name} is no array")
    return cast("list[Any]", value)


def _array(value: object, length: int, name: str) -> list[Any]:
    if value is None:
        return [None] * length
    values = _list(value, name)
    if len(values) != length:
        raise Unusable(f"{name} is not as long as its timestamps")
    return values


def _numbers(value: object, length: int, name: str) -> list[float | None]:
    return [
        None if entry is None else _number(entry, name) for entry in _array(value, length, name)
    ]


def _number(entry: object, name: str) -> float:
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        raise Unusable(f"{name} holds something that is no number")
    if not 0 <= entry <= (100.0 if name == "percentage" else _MOST):
        raise Unusable(f"{name} holds a number out of range")
    if name in _WHOLE and entry != int(entry):
        raise Unusable(f"{name} holds a fraction")
    return float(entry)


def _rounded(value: float) -> int:
    """Half up, where Python's `round` goes to the even number."""
    return math.floor(value + 0.5)


def _moment(value: object) -> datetime:
    """An ISO 8601 time; without an offset it is UTC."""
    if not isinstance(value, str):
        raise Unusable("a time is no text")
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Unusable("a time is not in ISO 8601") from error


def _check_interval(value: object, seconds: int) -> None:
    """Bare counts are rate x interval: an answer in other buckets than asked for would be miscounted."""
    if not isinstance(value, str):
        return
    try:
        answered = interval_seconds(value)
    except ValueError:
        return
    if answered != seconds:
        raise Unusable(f"asked for buckets of {seconds} s, answered {value}")
