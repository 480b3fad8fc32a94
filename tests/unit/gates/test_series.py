"""Every way in which a metrics answer can say "no requests" is read alike, and an odd answer is never counted."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gates.rollouts import Served, answer, moment
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.metrics.series import ArmTraffic, RolloutSeries, Unusable

ROWS = {0: Served(100, 1, empty=2, output=900.0), 1: Served(50, 0, output=400.0), 2: Served(0)}


def both(
    rows: Any = ROWS, *, end: float = 3, extended: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    return answer(rows, end=end, extended=extended), answer(rows, end=end, extended=extended)


def counts(series: RolloutSeries) -> list[tuple[int, int]]:
    return [(b.candidate.requests, b.candidate.errors) for b in series.buckets]


@pytest.mark.parametrize("extended", [True, False])
def test_requests_and_errors_are_counted_with_and_without_the_extension(extended: bool) -> None:
    series = read_series(*both(extended=extended), "1m")
    assert counts(series) == [(100, 1), (50, 0), (0, 0)]
    assert series.buckets[0].candidate.empty == (2 if extended else None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9_999), min_size=1, max_size=5), st.data())
def test_bare_rates_with_two_decimals_give_the_same_counts(
    requests: list[int], data: st.DataObject
) -> None:
    rows = {i: Served(n, data.draw(st.integers(0, n)), output=1.0) for i, n in enumerate(requests)}
    bare = both(rows, end=9, extended=False)
    for one in bare:
        errors = one["metrics"]["error_rate"]
        errors["percentage"] = [round(p, 2) for p in errors["percentage"]]
    assert counts(read_series(*bare, "1m")) == counts(read_series(*both(rows, end=9), "1m"))


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_timestamps_does_not_matter(random: Any, extended: bool) -> None:
    expected = read_series(*both(extended=extended), "1m")
    mixed = both(extended=extended)
    for one in mixed:
        for metric in one["metrics"].values():
            order = list(range(len(metric["timestamps"])))
            random.shuffle(order)
            metric.update({name: [values[i] for i in order] for name, values in metric.items()})
    assert read_series(*mixed, "1m") == expected


EMPTY = {
    "zeros": lambda m: None,
    "no arrays": lambda m: [metric.update({k: [] for k in metric}) for metric in m.values()],
    "no metrics": lambda m: m.clear(),
    "null metrics": lambda m: m.update(dict.fromkeys(m)),
    "nulls": lambda m: m["throughput"].update(requests_per_second=[None] * 3),
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("extended", [True, False])
def test_zeros_nulls_and_absence_are_all_no_requests(empty: Any, extended: bool) -> None:
    baseline = answer(ROWS, end=3, extended=extended)
    candidate = answer(dict.fromkeys(range(3), Served()), end=3, extended=extended)
    empty(candidate["metrics"])
    series = read_series(baseline, candidate, "1m")
    assert [(b.candidate.requests, b.candidate.errors) for b in series.buckets] == [(0, 0)] * 3


def test_only_buckets_that_both_have_finished_are_read() -> None:
    one, other = both()
    other["metrics"]["throughput"]["complete"] = [True, False, False]
    assert len(read_series(one, other, "1m").buckets) == 1
    other = answer(ROWS, end=2.5, extended=False)
    assert len(read_series(one, other, "1m").buckets) == 2


def change(path: str, value: Any) -> Any:
    def apply(one: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = one
        for key in parents:
            place = place[key]
        place[last] = value

    return apply


BAD = {
    "unequal arrays": change("metrics.throughput.requests_per_second", [1.0]),
    "infinite": change("metrics.throughput.requests_per_second", [float("inf"), 1.0, 0.0]),
    "not a number": change("metrics.throughput.requests_per_second", [float("nan"), 1.0, 0.0]),
    "negative": change("metrics.throughput.requests_per_second", [-1.0, 1.0, 0.0]),
    "text": change("metrics.throughput.requests_per_second", ["1", 1.0, 0.0]),
    "boolean": change("metrics.throughput.requests_per_second", [True, 1.0, 0.0]),
    "above 100 percent": change("metrics.error_rate.percentage", [100.5, 0.0]),
    "requests without errors": change("metrics.error_rate", {}),
    "rate of errors unknown": change("metrics.error_rate.percentage", [None, 0.0]),
    "no array": change("metrics.latency.timestamps", "now"),
    "bad time": change("metrics.latency.timestamps", ["yesterday", "today"]),
    "number as time": change("metrics.latency.timestamps", [1, 2]),
    "metrics no object": change("metrics", []),
    "metric no object": change("metrics.latency", [1]),
    "no end": change("end_time", None),
    "other buckets": change("interval", "5m"),
    "endless number": change("metrics.throughput.requests_per_second", [10**400, 1.0, 0.0]),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_a_series_that_cannot_be_counted_is_unusable(spoil: Any) -> None:
    one, other = both(extended=False)
    other["end_time"] = moment(1)
    spoil(other)
    with pytest.raises(Unusable):
        read_series(one, other, "1m")


BAD_COUNTS = {
    "fraction": change("metrics.error_rate.request_count", [1.5, 50]),
    "more errors than requests": change("metrics.error_rate.error_count", [101, 0]),
    "errors unknown": change("metrics.error_rate.error_count", [None, 0]),
    "histogram falls": change(
        "metrics.latency.histogram", {"le": [1, None], "counts": [[3, 2], [1, 1]]}
    ),
    "histogram without end": change(
        "metrics.latency.histogram", {"le": [1, 2], "counts": [[1, 2], [1, 1]]}
    ),
    "edges fall": change(
        "metrics.latency.histogram", {"le": [2, 1, None], "counts": [[1, 2, 3]] * 2}
    ),
    "rows missing": change("metrics.latency.histogram", {"le": [1, None], "counts": [[1, 1]]}),
}


@pytest.mark.parametrize("spoil", BAD_COUNTS.values(), ids=BAD_COUNTS.keys())
def test_extension_counts_are_checked_as_well(spoil: Any) -> None:
    one, other = both()
    other["end_time"] = moment(1)
    spoil(other)
    with pytest.raises(Unusable):
        read_series(one, other, "1m")


def test_a_failed_call_is_unusable_and_throughput_null_in_both_too() -> None:
    one, other = both(extended=False)
    with pytest.raises(Unusable):
        read_series(one, None, "1m")
    for answered in (one, other):
        answered["metrics"]["throughput"]["requests_per_second"] = [None] * 3
    with pytest.raises(Unusable):
        read_series(one, other, "1m")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_junk_anywhere_is_read_or_unusable_and_never_another_error(
    data: st.DataObject, extended: bool
) -> None:
    one, other = both(extended=extended)
    place: Any = other
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            place[key] = data.draw(junk)
            break
        place = place[key]
    try:
        series = read_series(one, other, "1m")
    except Unusable:
        return
    for bucket in series.buckets:
        assert 0 <= bucket.candidate.errors <= bucket.candidate.requests


def test_the_contract_s_model_reads_the_same() -> None:
    raw = both()
    for one in raw:
        one.update(deployment_id="dep_1", start_time="2026-01-01T00:00:00Z", summary={})
    one, other = (DeploymentMetrics.model_validate(json) for json in copy.deepcopy(raw))
    found, expected = read_series(one, other, "1m"), read_series(*raw, "1m")
    assert found == expected


def test_a_deployment_unknown_to_one_metric_has_no_traffic_there() -> None:
    raw = json.loads(json.dumps(both()[0]))
    del raw["metrics"]["token_usage"]
    series = read_series(raw, raw, "1m")
    assert series.buckets[2].candidate == ArmTraffic()
