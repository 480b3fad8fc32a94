"""The service computes a deployment's metrics for any interval and span from windows of several widths (§4.5)."""

import math
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.service.in_process import Service
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.metrics.observations import Observation, RequestOutcome

pytestmark = pytest.mark.both_databases(postgres="soak")

COUNTED = (RequestOutcome.SUCCESS, RequestOutcome.SERVER_ERROR)
# Minutes of the traffic that most tests use.
MINUTES = 3 * 60


@pytest.fixture(scope="module")
def traffic(shared: Service) -> "Traffic":
    return Traffic(shared)


class Traffic:
    """A deployment with known observations over three hours with gaps, some of them through an endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.deployment = service.deployment("metrics of three hours")
        self.canary = service.canary("canary of three hours", {self.deployment: 100})
        self.start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(
            hours=4
        )
        dice = random.Random(3)  # noqa: S311 - traffic of a test
        kinds = [*[RequestOutcome.SUCCESS] * 8, RequestOutcome.SERVER_ERROR]
        kinds += [RequestOutcome.CANCELLED, RequestOutcome.REFUSED]
        self.observations = [
            Observation(
                deployment_id=self.deployment,
                endpoint_id=dice.choice(["", self.canary]),
                ended_at=self.start.timestamp() + minute * 60 + dice.random() * 60,
                outcome=dice.choice(kinds),
                latency_ms=dice.lognormvariate(4, 1),
                prompt_tokens=dice.randrange(9),
                completion_tokens=dice.randrange(9),
                is_empty=dice.random() < 0.1,
                caller=dice.randrange(5),
            )
            for minute in range(MINUTES)
            if minute % 10 != 3
            for _ in range(dice.randrange(1, 12))
        ]
        for one in self.observations:
            service.parts.recorder.record(one)

    def ask(self, **query: Any) -> dict[str, Any]:
        end = self.start + timedelta(minutes=MINUTES)
        span = {"start_time": self.start.isoformat(), "end_time": end.isoformat()}
        answer = self.service.call(
            "GET", f"/v1/deployments/{self.deployment}/metrics", params=span | query
        )
        assert answer.status_code == 200, answer.text
        return answer.json()


def percentile(latencies: Sequence[float], quantile: float) -> float:
    return sorted(latencies)[math.floor(quantile * (len(latencies) - 1))]


def of(observations: Sequence[Observation], outcome: RequestOutcome) -> list[Observation]:
    return [one for one in observations if one.outcome is outcome]


def check_row(series: dict[str, Any], index: int, own: Sequence[Observation]) -> None:
    """Check one bucket of `latency` against exact arithmetic."""
    latencies = [one.latency_ms for one in of(own, RequestOutcome.SUCCESS)]
    assert series["average"][index] == pytest.approx(sum(latencies) / len(latencies))
    for name, quantile in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert series[name][index] == pytest.approx(percentile(latencies, quantile), rel=0.0101)
    assert series["histogram"]["counts"][index][-1] == len(latencies)


@pytest.mark.parametrize("interval", ["10s", "1m", "90s", "7m", "1h", "100m", "1d"])
@pytest.mark.parametrize("through_endpoint", [False, True])
def test_every_interval_says_what_the_observations_say(
    traffic: Traffic, interval: str, through_endpoint: bool
) -> None:
    seconds = int(interval[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[interval[-1]]
    meant = [one for one in traffic.observations if one.endpoint_id or not through_endpoint]
    buckets: dict[int, list[Observation]] = {}
    ended: dict[int, list[Observation]] = {}
    for one in meant:
        start = int(one.ended_at) // seconds * seconds
        ended.setdefault(start, []).append(one)
        if one.outcome in COUNTED:
            buckets.setdefault(start, []).append(one)
    query = {"endpoint_id": traffic.canary} if through_endpoint else {}
    answer = traffic.ask(interval=interval, **query)
    series, summary = answer["metrics"], answer["summary"]
    check_errors(series["error_rate"], summary["error_rate"], ended)
    check_latency(series["latency"], buckets)
    whole = {"average": [], "p50": [], "p95": [], "p99": []}
    one_row = {name: [summary["latency"][name]] for name in whole}
    every = [one for own in buckets.values() for one in own]
    one_row["histogram"] = {"counts": [[len(of(every, RequestOutcome.SUCCESS))]]}
    check_row(one_row, 0, every)
    check_every_bucket(series, summary, buckets, seconds)


def starts_of(series: dict[str, Any]) -> list[int]:
    return [int(datetime.fromisoformat(one).timestamp()) for one in series["timestamps"]]


def check_errors(
    series: dict[str, Any], summary: dict[str, Any], ended: dict[int, list[Observation]]
) -> None:
    """Check every bucket in which a request ended, with any outcome."""
    rows = [ended[start] for start in sorted(ended)]
    errors = [of(row, RequestOutcome.SERVER_ERROR) for row in rows]
    bad = [len(one) for one in errors]
    requests = [
        len(of(row, RequestOutcome.SUCCESS)) + count for row, count in zip(rows, bad, strict=True)
    ]
    assert starts_of(series) == sorted(ended)
    assert (series["request_count"], series["error_count"]) == (requests, bad)
    assert series["percentage"] == [
        100 * few / all_ if all_ else None for few, all_ in zip(bad, requests, strict=True)
    ]
    assert series["cancelled_count"] == [len(of(row, RequestOutcome.CANCELLED)) for row in rows]
    assert series["refused_count"] == [len(of(row, RequestOutcome.REFUSED)) for row in rows]
    assert series["error_callers"] == [len({one.caller for one in row}) for row in errors]
    assert (summary["request_count"], summary["error_count"]) == (sum(requests), sum(bad))
    assert summary["average_percentage"] == pytest.approx(100 * sum(bad) / sum(requests))


def check_latency(series: dict[str, Any], buckets: dict[int, list[Observation]]) -> None:
    with_success = {start: own for start, own in buckets.items() if of(own, RequestOutcome.SUCCESS)}
    assert starts_of(series) == sorted(with_success)
    for index, start in enumerate(sorted(with_success)):
        check_row(series, index, with_success[start])
    assert series["histogram"]["le"] == [*(float(2**power) for power in range(18)), None]


def check_every_bucket(
    series: dict[str, Any],
    summary: dict[str, Any],
    buckets: dict[int, list[Observation]],
    seconds: int,
) -> None:
    """Check `throughput` and `token_usage`, which have empty buckets too."""
    starts = starts_of(series["throughput"])
    assert starts == list(range(starts[0], starts[-1] + 1, seconds))
    assert set(buckets) <= set(starts)
    own = [buckets.get(start, []) for start in starts]
    assert series["throughput"]["requests_per_second"] == [len(one) / seconds for one in own]
    usage = series["token_usage"]
    assert starts_of(usage) == starts
    assert usage["input"] == [sum(one.prompt_tokens for one in row) for row in own]
    assert usage["output"] == [sum(one.completion_tokens for one in row) for row in own]
    assert usage["total"] == [a + b for a, b in zip(usage["input"], usage["output"], strict=True)]
    assert usage["empty_count"] == [
        sum(one.is_empty for one in of(row, RequestOutcome.SUCCESS)) for row in own
    ]
    assert summary["token_usage"]["total"] == sum(usage["total"])
    every = sum(map(len, own)) / (MINUTES * 60)
    assert summary["throughput"]["average_requests_per_second"] == pytest.approx(every)


def test_the_answer_is_exactly_what_the_contract_says(traffic: Traffic) -> None:
    """The answer is rendered without the contract's models, so they validate it here: nothing may be lost or added."""
    for query in ({}, {"metrics": "latency"}, {"metrics": "throughput,token_usage"}):
        answer = traffic.ask(**query)
        assert DeploymentMetrics.model_validate(answer).model_dump(mode="json") == answer


@pytest.mark.parametrize(
    "query",
    [
        "metrics=latency&metrics=error_rate",
        "metrics=latency,error_rate",
        "metrics[]=error_rate&metrics[]=latency",
        "metrics=latency&metrics=error_rate,latency",
    ],
)
def test_a_subset_of_the_metrics_is_answered_alone(traffic: Traffic, query: str) -> None:
    path = f"/v1/deployments/{traffic.deployment}/metrics?{query}"
    answer = traffic.service.call("GET", path).json()
    assert set(answer["metrics"]) == set(answer["summary"]) == {"latency", "error_rate"}


def test_a_part_of_a_bucket_is_the_whole_bucket(traffic: Traffic) -> None:
    """Buckets start on multiples of the interval, whatever the span."""
    late = traffic.start + timedelta(minutes=20, seconds=31)
    end = traffic.start + timedelta(minutes=22, seconds=1)
    answer = traffic.ask(start_time=late.isoformat(), end_time=end.isoformat())
    first = int(traffic.start.timestamp()) + 20 * 60
    assert starts_of(answer["metrics"]["throughput"]) == [first, first + 60, first + 120]
    assert answer["start_time"] == late.strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(answer: dict[str, Any]) -> tuple[int, int]:
    """The first and last second of the span that the summary names."""
    ends = (answer["summary_start_time"], answer["summary_end_time"])
    first, last = (int(datetime.fromisoformat(one).timestamp()) for one in ends)
    return first, last


def check_summary(summary: dict[str, Any], own: Sequence[Observation], seconds: int) -> None:
    """Check a summary against exact arithmetic."""
    counted = [one for one in own if one.outcome in COUNTED]
    assert summary["error_rate"]["request_count"] == len(counted)
    assert summary["error_rate"]["error_count"] == len(of(own, RequestOutcome.SERVER_ERROR))
    assert summary["token_usage"]["input"] == sum(one.prompt_tokens for one in counted)
    rate = summary["throughput"]["average_requests_per_second"]
    assert rate == pytest.approx(len(counted) / seconds)
    latencies = [one.latency_ms for one in of(own, RequestOutcome.SUCCESS)]
    if not latencies:
        assert set(summary["latency"].values()) == {None}
        return
    assert summary["latency"]["average"] == pytest.approx(sum(latencies) / len(latencies))
    assert summary["latency"]["p95"] == pytest.approx(percentile(latencies, 0.95), rel=0.0101)


SPANS = [
    (0, 1),
    (-7200, 1),
    (0, 60),
    (17, 44),
    (59, 3),
    (3599, 2),
    (61, 3600),
    (30, 9000),
    (20000, 1),
]


@pytest.mark.parametrize("interval", ["1s", "1m", "7m", "1d"])
@pytest.mark.parametrize(("begins", "lasts"), SPANS)
def test_the_summary_is_of_the_span_that_was_asked_for_whatever_the_interval(
    traffic: Traffic, interval: str, begins: int, lasts: int
) -> None:
    start = traffic.start + timedelta(seconds=begins)
    end = start + timedelta(seconds=lasts)
    span = {"start_time": start.isoformat(), "end_time": end.isoformat()}
    answer = traffic.ask(interval=interval, **span)
    own = [
        one for one in traffic.observations if start.timestamp() <= one.ended_at < end.timestamp()
    ]
    assert seconds_of(answer) == (start.timestamp(), end.timestamp())
    check_summary(answer["summary"], own, lasts)


def test_the_summary_of_a_second_without_traffic_beside_much_traffic_counts_nothing(
    traffic: Traffic,
) -> None:
    """An earlier version divided the counts of the whole day by this second."""
    for day in (0, 1):
        start = traffic.start - timedelta(hours=2) + timedelta(days=day)
        span = {
            "start_time": start.isoformat(),
            "end_time": (start + timedelta(seconds=1)).isoformat(),
        }
        summary = traffic.ask(interval="1d", **span)["summary"]
        check_summary(summary, [], 1)
        assert summary["throughput"]["average_requests_per_second"] == 0
        assert summary["token_usage"]["total"] == 0


def test_a_summary_of_forgotten_seconds_is_of_whole_minutes_and_says_so(service: Service) -> None:
    deployment = service.deployment("d")
    minute = int(service.clock().timestamp()) // 60 * 60 - 600
    own = [
        Observation(deployment, "", minute + second, RequestOutcome.SUCCESS, 5.0, prompt_tokens=1)
        for second in (5, 10, 70, 200)
    ]
    for one in own:
        service.parts.recorder.record(one)
    service.supervisor.records.store_metrics()

    def asked(first: int, last: int) -> dict[str, Any]:
        ends = [datetime.fromtimestamp(minute + one, UTC).isoformat() for one in (first, last)]
        query = {"start_time": ends[0], "end_time": ends[1], "interval": "1m"}
        path = f"/v1/deployments/{deployment}/metrics"
        answer = service.call("GET", path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    answer = asked(7, 71)
    assert seconds_of(answer) == (minute + 7, minute + 71)
    check_summary(answer["summary"], own[1:3], 64)
    service.clock.ahead += timedelta(days=3)
    answer = asked(7, 71)
    assert seconds_of(answer) == (minute, minute + 120)
    check_summary(answer["summary"], own[:3], 120)


def test_a_bucket_is_complete_once_nothing_can_come(service: Service) -> None:
    deployment = service.deployment("d")
    # The clock stands in the middle of a minute, because shortly after its end the minute before could still change.
    service.clock.ahead += timedelta(seconds=(30 - service.clock().timestamp()) % 60)
    service.parts.recorder.record(
        Observation(deployment, "", service.clock().timestamp(), RequestOutcome.SUCCESS, 5.0)
    )
    ask = lambda: service.call("GET", f"/v1/deployments/{deployment}/metrics").json()  # noqa: E731
    assert ask()["metrics"]["throughput"]["complete"][-1] is False
    service.clock.ahead += timedelta(minutes=2)
    series = ask()["metrics"]
    assert series["error_rate"]["complete"] == [True]
    assert series["throughput"]["complete"].count(False) == 1


def test_without_traffic_there_are_zeros_and_no_latency(service: Service) -> None:
    deployment = service.deployment("d")
    answer = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()
    assert answer["metrics"]["latency"]["timestamps"] == []
    assert answer["metrics"]["latency"]["histogram"]["counts"] == []
    assert set(answer["metrics"]["throughput"]["requests_per_second"]) == {0.0}
    assert answer["summary"]["error_rate"]["request_count"] == 0
    assert answer["summary"]["latency"]["p95"] is None


def test_a_month_by_minutes_is_answered(traffic: Traffic) -> None:
    start = traffic.start - timedelta(days=29)
    end = start + timedelta(days=30)
    answer = traffic.ask(start_time=start.isoformat(), end_time=end.isoformat(), interval="1m")
    counted = [one for one in traffic.observations if one.outcome in COUNTED]
    assert len(answer["metrics"]["throughput"]["timestamps"]) == 43_200
    assert sum(answer["metrics"]["error_rate"]["request_count"]) == len(counted)


REFUSED: dict[str, Callable[[datetime], str]] = {
    "interval=7w": lambda now: "interval=7w",
    "too wide": lambda now: "interval=2d",
    "too many points": lambda now: f"start_time={at(now, days=36)}&interval=1m",
    "backwards": lambda now: f"start_time={at(now, days=1)}&end_time={at(now, days=2)}",
    "no metric": lambda now: "metrics=latency,happiness",
    "long ago": lambda now: "start_time=1970-01-01T00:00:00Z&interval=1m",
    "no zone": lambda now: "start_time=2026-01-01T00:00:00",
    "unzoned words": lambda now: "end_time=yesterday",
}


def at(now: datetime, **before: int) -> str:
    return (now - timedelta(**before)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("case", REFUSED)
def test_a_query_that_cannot_be_answered_is_refused(traffic: Traffic, case: str) -> None:
    query = REFUSED[case](datetime.now(UTC))
    answer = traffic.service.call("GET", f"/v1/deployments/{traffic.deployment}/metrics?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "validation_error")
    param = answer.json()["error"]["param"].partition("[")[0]
    assert param in ("interval", "start_time", "end_time", "metrics")


def test_seconds_that_are_forgotten_are_refused_not_left_out(service: Service) -> None:
    deployment = service.deployment("d")
    now = service.clock()
    service.parts.recorder.record(
        Observation(deployment, "", now.timestamp(), RequestOutcome.SUCCESS, 5.0)
    )
    service.supervisor.records.store_metrics()
    path = f"/v1/deployments/{deployment}/metrics"
    query = {"start_time": at(now, hours=1), "end_time": at(now, minutes=-5), "interval": "30s"}
    assert service.call("GET", path, params=query).status_code == 200
    service.clock.ahead += timedelta(days=3)
    answer = service.call("GET", path, params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "interval")
    by_minutes = service.call("GET", path, params=query | {"interval": "1m"}).json()
    assert by_minutes["summary"]["error_rate"]["request_count"] == 1
    empty = query | {"start_time": at(now, hours=9), "end_time": at(now, hours=8)}
    assert service.call("GET", path, params=empty).status_code == 200  # there was no traffic
