"""Deployment metrics on the wire (§4.5). Series arrays may hold nulls on a foreign server, so they are read leniently.

Additive to the description: `complete`, `latency.histogram`, all cells, all counts of `error_rate`,
`token_usage.empty_count`, `traffic`, `summary_start_time` and `summary_end_time`, `in_flight` and
`generate_timeout_seconds`. Gates (`tuneship/gates/metrics/series.py`) decide from these series, never from `summary`.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tuneship.contract.common import AnyEndpointId, DeploymentId, Reply, Timestamp, absent
from tuneship.contract.declaring.examples import CANDIDATE, LATER, NOON
from tuneship.contract.declaring.operation import Example, operation

Numbers = list[float | None] | None
Counts = list[int | None] | None
MetricName = Literal["latency", "throughput", "error_rate", "token_usage", "traffic"]
METRIC_NAMES: tuple[MetricName, ...] = (
    *("latency", "throughput", "error_rate", "token_usage"),
    "traffic",
)


class Series(Reply):
    """Fields of every series: the starts of the buckets, and whether each of them can still change."""

    # Each series has its own times, because a bucket without a value may be left out of some.
    timestamps: list[Timestamp | None] | None = None
    complete: list[bool | None] | None = None


_CELLS = "Null where more than 20,160 buckets are asked for, two weeks of minutes."


class Histogram(Reply):
    """Latency counts per bucket: `counts[i][j]` requests of bucket i took at most `le[j]` ms (null: any)."""

    le: list[float | None]
    counts: list[list[int]]


# A share of slow requests that is guessed between edges at powers of two is wrong by up to a factor of two.
class CellCounts(Reply):
    """Counts per bucket in narrow cells: `count[i][j]` values of bucket i lie in cell `index[i][j]`, in rising order.

    Cell k holds values in (2^((k-1)/16), 2^(k/16)]: each is 4.4 % wider than the one before. Empty ones are left out.
    Null: the bucket holds requests from before the service counted this.
    """

    per_doubling: int
    index: list[list[int] | None]
    count: list[list[int] | None]


class LatencySeries(Series):
    """Milliseconds from acceptance to the last token, of successful requests that somebody waited for.

    Requests of batches give way to all others and are not timed, and neither are repeats (`traffic`). A bucket in which
    only they succeeded has nulls, and zeros in its histogram.
    """

    average: Numbers = None
    p50: Numbers = None
    p95: Numbers = None
    p99: Numbers = None
    histogram: Histogram | None = None
    cells: Annotated[
        CellCounts | None,
        Field(description=f"Additive. {_CELLS} The same requests as in `histogram`."),
    ] = None
    cells_per_token: Annotated[
        CellCounts | None,
        Field(
            description="Additive. Milliseconds per output token of each of these requests; an answer without a token "
            "counts as one of one token."
        ),
    ] = None


class ThroughputSeries(Series):
    """Requests a second."""

    requests_per_second: Numbers = None


class ErrorRateSeries(Series):
    """Server failures and timeouts as a percentage (0..100) of the requests that were answered or failed.

    A request is in one of `request_count` (successes and errors), `cancelled_count` and `refused_count`; the last two
    may be the caller's own doing, so they are part of no rate. Compare two deployments with the same callers: one that
    hangs, or refuses what the other accepts, shows there alone. Null in the last three arrays: the bucket holds
    requests from before the service counted this.
    """

    percentage: Annotated[
        Numbers,
        Field(description="`error_count` in 100 `request_count`; null in a bucket without any."),
    ] = None
    request_count: Counts = None
    error_count: Counts = None
    cancelled_count: Annotated[
        Counts,
        Field(
            description="Additive. Callers who disconnected before their answer ended, whole or streamed, also while "
            "it waited in the queue. Counted when they disconnect."
        ),
    ] = None
    refused_count: Annotated[
        Counts,
        Field(
            description="Additive. Requests that the deployment refused with a 4xx after they were routed to it: too "
            "long a prompt, more tokens than it gives, turns that its template does not take. Not 401, 403 and 429, "
            "nor what is refused before a deployment is chosen; a deployment that cannot serve (409) is an error."
        ),
    ] = None
    error_callers: Annotated[
        Counts,
        Field(
            description="Additive. Distinct callers among the errors, by `X-Routing-Key`, else by API key: one caller "
            "who repeats is one caller. Exact below "
            "256, an estimate (standard error 6 %) from there. A caller counts twice in a bucket in which the service "
            "was restarted."
        ),
    ] = None
    cancelled_callers: Annotated[
        Counts,
        Field(description=f"Additive. Distinct callers among the cancelled requests. {_CELLS}"),
    ] = None
    refused_callers: Annotated[
        Counts,
        Field(description=f"Additive. Distinct callers among the refused requests. {_CELLS}"),
    ] = None


class TokenUsageSeries(Series):
    """Tokens the model read and wrote; `empty_count` counts 200 answers with a blank completion and no call."""

    total: Counts = None
    input: Counts = None
    output: Counts = None
    empty_count: Counts = None
    cells: Annotated[
        CellCounts | None,
        Field(
            description="Additive. Output tokens per answer, of the requests whose latency is counted; an answer "
            "without any is in the lowest cell."
        ),
    ] = None


class TrafficSeries(Series):
    """Additive. How the requests of a bucket were distributed; null where the service did not count it.

    While a split is active, a routing key with more than 2 % of an endpoint's requests in ten minutes is drawn by
    request, and a smaller one has at most 5 % of a deployment's requests in a minute (at least one) in what the gates
    count: later ones are its repeats. They are in all other counts, but are not timed.
    """

    spread_keys: Annotated[
        Counts, Field(description="The largest number of routing keys that were drawn by request.")
    ] = None
    callers_of_half: Annotated[
        Counts,
        Field(
            description="The smallest number of callers who sent half of the requests, by `X-Routing-Key`. A request "
            "that was drawn by itself, with a large key or without one, is a caller of its own."
        ),
    ] = None
    replicas: Annotated[
        Counts, Field(description="The largest number of replicas that were running.")
    ] = None
    repeated_requests: Annotated[
        Counts, Field(description="Repeats in `request_count`; those in other counts follow.")
    ] = None
    repeated_errors: Counts = None
    repeated_empty: Counts = None
    repeated_cancelled: Counts = None
    repeated_refused: Counts = None


class MetricSeries(Reply):
    """The requested series."""

    latency: LatencySeries | None = Field(default=None, exclude_if=absent)
    throughput: ThroughputSeries | None = Field(default=None, exclude_if=absent)
    error_rate: ErrorRateSeries | None = Field(default=None, exclude_if=absent)
    token_usage: TokenUsageSeries | None = Field(default=None, exclude_if=absent)
    traffic: TrafficSeries | None = Field(default=None, exclude_if=absent)


class LatencySummary(Reply):
    """Latency over the whole span. Every field is null where no request was timed: 0 ms would be the best of all."""

    average: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class ThroughputSummary(Reply):
    """Mean over the whole span."""

    average_requests_per_second: float | None = None


class ErrorRateSummary(Reply):
    """`request_count` 0 means "no data", not "no errors"."""

    average_percentage: float | None = None
    request_count: int | None = None
    error_count: int | None = None


class TokenUsageSummary(Reply):
    """Sums over the whole span."""

    total: int | None = None
    input: int | None = None
    output: int | None = None


class MetricSummary(Reply):
    """One summary for each requested series."""

    latency: LatencySummary | None = Field(default=None, exclude_if=absent)
    throughput: ThroughputSummary | None = Field(default=None, exclude_if=absent)
    error_rate: ErrorRateSummary | None = Field(default=None, exclude_if=absent)
    token_usage: TokenUsageSummary | None = Field(default=None, exclude_if=absent)


class RequestAges(Reply):
    """`counts[j]` requests are at most `le[j]` ms old (null: any)."""

    # Null, since JSON has no infinity.
    le: list[float | None]
    counts: list[int]


class InFlight(Reply):
    """Requests in flight that somebody waits for: those in the queue and streams are among them, batches are not."""

    requests: int
    ages_ms: RequestAges


class DeploymentMetrics(Reply):
    """Metrics of one deployment (§4.5). Times are by the service's clock."""

    deployment_id: str
    start_time: Timestamp
    end_time: Timestamp
    interval: str
    metrics: MetricSeries
    summary: MetricSummary
    # Counts of a longer time divided by a shorter one would give a load that never existed.
    summary_start_time: Annotated[
        Timestamp | None,
        Field(
            exclude_if=absent,
            description="Additive. What `summary` counts begins here: `start_time` to the second, or to the minute "
            "where it is more than two days ago. It does not depend on `interval`, and rates are divided by this span.",
        ),
    ] = None
    summary_end_time: Annotated[
        Timestamp | None,
        Field(exclude_if=absent, description="Additive. And ends before this moment."),
    ] = None
    in_flight: Annotated[
        InFlight | None,
        Field(
            exclude_if=absent,
            description="Additive. What the deployment is answering at `end_time`, by the time since it was accepted; "
            "through `endpoint_id`, where that was asked for. It shows a request that hangs before it times out. In "
            "a cluster it covers the members that have reported since the newest complete bucket. Left "
            "out where `end_time` is past: nobody remembers it.",
        ),
    ] = None
    generate_timeout_seconds: Annotated[
        float | None,
        Field(
            exclude_if=absent,
            description="Additive. A generation that lasts longer is ended and becomes an error: a hanging one shows "
            "in `error_count` no sooner.",
        ),
    ] = None

    def frame(self) -> Any:
        """A pandas frame: one row a bucket by its start, columns such as `latency_p95`, `error_rate_percentage`."""
        from tuneship.contract.declaring.frames import deployment_frame  # noqa: PLC0415 - loads pandas

        series = {name: dict(one) for name, one in self.metrics if one is not None}
        return deployment_frame(series)


Interval = Annotated[
    str,
    Field(
        pattern=r"^[1-9][0-9]{0,8}[smhd]$",
        description="Bucket length: `<n>s`, `<n>m`, `<n>h`, `<n>d`, 1s to 1d; at most 50,000 buckets in an answer.",
    ),
]


# Examples of the OpenAPI document.
EXAMPLE_BUCKETS = {"timestamps": [NOON], "complete": [True]}

EXAMPLE_METRICS = {
    "deployment_id": CANDIDATE,
    "start_time": NOON,
    "end_time": LATER,
    "interval": "10m",
    "metrics": {
        "latency": {
            **EXAMPLE_BUCKETS,
            "average": [41.5],
            "p50": [38.0],
            "p95": [77.0],
            "p99": [91.0],
            "histogram": {"le": [32.0, 64.0, 128.0, None], "counts": [[120, 540, 600, 600]]},
            "cells": {"per_doubling": 16, "index": [[80, 96, 112]], "count": [[120, 420, 60]]},
            "cells_per_token": {"per_doubling": 16, "index": [[30, 36]], "count": [[350, 250]]},
        },
        "throughput": {**EXAMPLE_BUCKETS, "requests_per_second": [1.0]},
        "error_rate": {
            **EXAMPLE_BUCKETS,
            "percentage": [0.0],
            "request_count": [600],
            "error_count": [0],
            "cancelled_count": [2],
            "refused_count": [1],
            "error_callers": [0],
            "cancelled_callers": [2],
            "refused_callers": [1],
        },
        "token_usage": {
            **EXAMPLE_BUCKETS,
            "total": [18_000],
            "input": [12_600],
            "output": [5_400],
            "empty_count": [0],
            "cells": {"per_doubling": 16, "index": [[48, 52]], "count": [[250, 350]]},
        },
        "traffic": {
            **EXAMPLE_BUCKETS,
            "spread_keys": [1],
            "callers_of_half": [214],
            "replicas": [2],
            "repeated_requests": [0],
            "repeated_errors": [0],
            "repeated_empty": [0],
            "repeated_cancelled": [0],
            "repeated_refused": [0],
        },
    },
    "summary": {
        "latency": {"average": 41.5, "p50": 38.0, "p95": 77.0, "p99": 91.0},
        "throughput": {"average_requests_per_second": 1.0},
        "error_rate": {"average_percentage": 0.0, "request_count": 600, "error_count": 0},
        "token_usage": {"total": 18_000, "input": 12_600, "output": 5_400},
    },
    "summary_start_time": NOON,
    "summary_end_time": LATER,
    "in_flight": {
        "requests": 3,
        "ages_ms": {"le": [100.0, 1000.0, 10_000.0, None], "counts": [2, 3, 3, 3]},
    },
    "generate_timeout_seconds": 120.0,
}


@operation(
    "GET",
    "/v1/deployments/{deployment_id}/metrics",
    scope="metrics:read",
    example=Example(reply=EXAMPLE_METRICS),
)
def get_deployment_metrics(
    deployment_id: DeploymentId,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    metrics: list[MetricName] | None = None,
    interval: Interval = "1m",
    endpoint_id: AnyEndpointId | None = None,
) -> DeploymentMetrics:
    """Read latency, throughput, errors and tokens in buckets (§4.5); default: the last hour by minutes.

    Buckets without requests are left out of latencies and error rates; `complete` says which buckets can still change.
    Seconds are kept for two days, minutes and hours for 90: an `interval` that is not whole minutes is refused where it
    would have to leave out older traffic. `summary` covers the span from `start_time` up to `end_time`, also one
    without traffic or in the future.

    Of callers the service keeps keyed hashes of 32 bits for these counts, and returns none of them.
    """
    raise NotImplementedError
