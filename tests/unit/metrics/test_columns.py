"""Columns agree with exact arithmetic over the same samples, merged or not, also after storing."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tuneship.metrics import columns
from tuneship.metrics.columns import EDGES_MS, FACTS, QUANTILES, Columns
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.metrics.recorder import Recorder
from tuneship.metrics.windows import MetricWindow

LATENCIES = st.floats(0.02, 500_000)
REQUESTS = st.lists(st.tuples(st.sampled_from(list(RequestOutcome)), LATENCIES), max_size=30)


@dataclass
class Sample:
    """Requests, and the values that a merged row of them must have."""

    requests: list[tuple[RequestOutcome, float]]

    @property
    def latencies(self) -> list[float]:
        return sorted(
            latency for outcome, latency in self.requests if outcome is RequestOutcome.SUCCESS
        )


def window_of(requests: Sequence[tuple[RequestOutcome, float]]) -> MetricWindow:
    window = MetricWindow()
    for outcome, latency in requests:
        caller = caller_of((outcome, latency))
        window.add(
            Observation(
                "dep_a", "", 1.0, outcome, latency, 2, 3, is_empty=latency > 100, caller=caller
            )
        )
    return window


def caller_of(request: tuple[RequestOutcome, float]) -> int:
    return int(request[1]) % 7


def callers_among(requests: Sequence[tuple[RequestOutcome, float]], outcome: RequestOutcome) -> int:
    return len({caller_of(one) for one in requests if one[0] is outcome})


def read_back(windows: Columns) -> Columns:
    return columns.from_stored(windows.encoded(), windows.encoded_more())


def derived(windows: Sequence[MetricWindow]) -> Columns:
    return columns.grouped(columns.from_windows(windows), np.arange(len(windows)))[1]


@given(st.lists(LATENCIES, min_size=1, max_size=300))
@example([1.0] * 21)
@example([0.02, 500_000.0])
def test_percentiles_are_within_one_percent_of_the_exact_ones(latencies: list[float]) -> None:
    [row] = derived([window_of([(RequestOutcome.SUCCESS, one) for one in latencies])]).facts
    for name, quantile in QUANTILES.items():
        exact = sorted(latencies)[math.floor(quantile * (len(latencies) - 1))]
        assert row[name] == pytest.approx(exact, rel=0.01 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), REQUESTS), min_size=1, max_size=12))
def test_a_merged_row_says_what_its_requests_say(
    parts: list[tuple[int, list[tuple[RequestOutcome, float]]]],
) -> None:
    stored = derived([window_of(requests) for _, requests in parts])
    places, found = columns.grouped(read_back(stored), np.array([place for place, _ in parts]))
    assert places.tolist() == sorted({place for place, _ in parts})
    for place, row in zip(places, found.facts, strict=True):
        own = [request for into, requests in parts if into == place for request in requests]
        counted = [
            one for one in own if one[0] in (RequestOutcome.SUCCESS, RequestOutcome.SERVER_ERROR)
        ]
        exact = Sample(own).latencies
        assert row["requests"] == len(counted)
        outcomes = Counter(outcome for outcome, _ in own)
        assert row["cancelled"] == outcomes[RequestOutcome.CANCELLED]
        assert row["refused"] == outcomes[RequestOutcome.REFUSED]
        assert row["error_callers"] == callers_among(own, RequestOutcome.SERVER_ERROR)
        [more] = found.more[places == place]
        assert more["cancelled_callers"] == callers_among(own, RequestOutcome.CANCELLED)
        assert more["refused_callers"] == callers_among(own, RequestOutcome.REFUSED)
        assert columns.is_some(found.facts[places == place]).tolist() == [bool(own)]
        assert row["errors"] == len(counted) - len(exact)
        assert (row["input"], row["output"]) == (2 * len(counted), 3 * len(counted))
        assert row["empty"] == sum(latency > 100 for latency in exact)
        assert row["latency_sum_ms"] == pytest.approx(sum(exact))
        for name, quantile in QUANTILES.items():
            true = exact[math.floor(quantile * (len(exact) - 1))] if exact else 0.0
            assert row[name] == pytest.approx(true, rel=0.01 + 1e-9)


@given(st.lists(REQUESTS, min_size=1, max_size=4))
def test_stored_columns_are_read_back_bit_for_bit(
    windows: list[list[tuple[RequestOutcome, float]]],
) -> None:
    whole = derived([window_of(one) for one in windows])
    again = read_back(whole)
    assert np.array_equal(again.facts, whole.facts)
    assert np.array_equal(again.more, whole.more)
    for one, other in zip(again.lists, whole.lists, strict=True):
        assert np.array_equal(one.values, other.values)
        assert np.array_equal(one.lengths, other.lengths)


@pytest.mark.parametrize("many", [255, 256, 3_000, 40_000])
def test_many_callers_are_estimated_alike_in_whatever_parts_they_came(many: int) -> None:
    """The number is exact below 256. Above it is estimated from the 256 smallest numbers, which every union keeps."""
    recorder = Recorder()
    numbers = [recorder.number_of(str(one)) for one in range(many)]

    def stored(own: list[int]) -> Columns:
        # The estimate is never larger than the number of errors, or of refused requests.
        number, callers = 2 * len(own), set(own)
        window = MetricWindow(number, number, error_callers=callers)
        window.refused_count, window.refused_callers = number, callers
        return read_back(derived([window]))

    whole = stored(numbers)
    parts = columns.joined(*(stored(numbers[first::5]) for first in range(5)))
    _, joined = columns.grouped(columns.joined(parts, parts), np.zeros(10, np.int64))
    [row] = whole.facts
    assert joined.facts["error_callers"].tolist() == [row["error_callers"]]
    assert joined.error_callers.values.tolist() == whole.error_callers.values.tolist()
    assert joined.more["refused_callers"].tolist() == [row["error_callers"]]
    assert joined.refused_callers.values.tolist() == whole.error_callers.values.tolist()
    distinct = len(set(numbers))
    if distinct < columns.MAX_CALLERS:
        assert row["error_callers"] == distinct
    else:  # The estimate may be off by six standard errors.
        assert row["error_callers"] == pytest.approx(distinct, rel=6 / math.sqrt(256))
    [encoded] = whole.encoded()
    assert len(encoded) <= FACTS.itemsize + columns.MAX_CALLERS * columns.CALLER.itemsize


@given(REQUESTS)
def test_the_histogram_is_cumulative_and_ends_with_every_success(
    requests: list[tuple[RequestOutcome, float]],
) -> None:
    [row] = derived([window_of(requests)]).facts
    exact = Sample(requests).latencies
    assert row["histogram"].tolist() == sorted(row["histogram"])
    assert row["histogram"][-1] == len(exact)
    for edge, count in zip(EDGES_MS, row["histogram"], strict=False):
        surely = sum(latency <= edge / 1.0101 for latency in exact)
        assert surely <= count <= sum(latency <= edge * 1.0101 for latency in exact)


@given(st.lists(st.lists(st.tuples(st.booleans(), LATENCIES), max_size=20), min_size=1, max_size=6))
def test_percentiles_are_those_of_the_requests_that_are_no_batches(
    rows: list[list[tuple[bool, float]]],
) -> None:
    windows = [MetricWindow() for _ in rows]
    for window, requests in zip(windows, rows, strict=True):
        for is_background, latency in requests:
            window.add(
                Observation(
                    *("dep_a", "", 1.0, RequestOutcome.SUCCESS, latency),
                    is_background=is_background,
                )
            )
    found = derived(windows)
    again = columns.grouped(read_back(found), np.arange(len(rows)))[1]
    assert np.array_equal(again.facts, found.facts)
    timed = [sorted(latency for is_background, latency in one if not is_background) for one in rows]
    assert columns.timed_requests(found.facts).tolist() == list(map(len, timed))
    for row, requests, exact in zip(found.facts, rows, timed, strict=True):
        assert row["requests"] == len(requests)
        assert row["latency_sum_ms"] == pytest.approx(sum(exact))
        for name, quantile in QUANTILES.items():
            true = exact[math.floor(quantile * (len(exact) - 1))] if exact else 0.0
            assert row[name] == pytest.approx(true, rel=0.01 + 1e-9)


ANSWERS = st.lists(st.tuples(LATENCIES, st.integers(0, 5_000)), max_size=40)


def answered(requests: Sequence[tuple[float, int]]) -> MetricWindow:
    window = MetricWindow()
    for latency, tokens in requests:
        window.add(Observation("dep_a", "", 1.0, RequestOutcome.SUCCESS, latency, 2, tokens))
    return window


def cells_of(windows: Columns, name: str) -> list[dict[int, int]]:
    merged = columns.cells(getattr(windows, name), is_sketch=name == "latencies")
    assert all(len(set(row["index"].tolist())) == len(row) for row in merged.rows())
    return [dict(row.tolist()) for row in merged.rows()]


def cell_of_quantile(cells: dict[int, int], quantile: float) -> int:
    rank = math.floor(quantile * (sum(cells.values()) - 1)) + 1
    return next(
        cell
        for cell, seen in zip(
            sorted(cells), accumulate(cells[k] for k in sorted(cells)), strict=True
        )
        if seen >= rank
    )


@given(st.lists(ANSWERS, min_size=1, max_size=6), st.sampled_from([0.01, 0.5, 0.95, 0.99]))
def test_cells_hold_every_timed_request_and_its_quantiles_within_a_cell(
    rows: list[list[tuple[float, int]]], quantile: float
) -> None:
    """A cell is 4.4 % wide, and the stored sketch is exact to 1 %."""
    width = 2 ** (1 / 16) * 1.01
    _, whole = columns.grouped(
        read_back(derived([answered(one) for one in rows])), np.zeros(len(rows), np.int64)
    )
    own = [one for requests in rows for one in requests]
    exact = {
        "latencies": [latency for latency, _ in own],
        "per_token": [latency / max(tokens, 1) for latency, tokens in own],
        "answer_tokens": [float(tokens) for _, tokens in own],
    }
    for name, values in exact.items():
        [cells] = cells_of(whole, name)
        assert sum(cells.values()) == len(own)
        if own:
            true = max(sorted(values)[math.floor(quantile * (len(own) - 1))], 0.01)
            upper = 2 ** (cell_of_quantile(cells, quantile) / 16)
            assert true / 1.0101 <= upper <= true * width * 1.0001


def test_cells_of_a_sketch_are_those_of_its_percentiles() -> None:
    dice = np.random.default_rng(1)
    values = [(float(one), 7) for one in dice.lognormal(6, 0.5, 3_000)]
    whole = derived([answered(values)])
    [cells] = cells_of(whole, "latencies")
    for name, quantile in QUANTILES.items():
        upper = 2 ** (cell_of_quantile(cells, quantile) / 16)
        assert upper / 2 ** (1 / 16) <= whole.facts[name][0] <= upper


@pytest.mark.parametrize(
    ("keys", "alone", "number"),
    [
        ([], 10, 5),
        ([10], 0, 1),
        ([5, 3, 2], 0, 1),
        ([4, 3, 3], 0, 2),
        ([4], 6, 2),
        ([1] * 40, 0, 20),
        ([100] * 40, 0, 20),
        ([], 0, 0),
    ],
)
def test_callers_of_half_are_the_fewest_that_sent_it(
    keys: list[int], alone: int, number: int
) -> None:
    window = MetricWindow(request_count=sum(keys) + alone)
    window.sticky_keys = {index * 7: count for index, count in enumerate(keys)}
    [found] = columns.callers_of_half(read_back(derived([window])))
    # Of keys beyond the largest, each request counts as a caller: never fewer callers than there are.
    assert found == number if len(keys) <= columns.MAX_STICKY else found >= number


@pytest.mark.parametrize("latency", [0.0, 1e-9, 1e12])
def test_a_latency_beyond_any_scale_is_still_counted(latency: float) -> None:
    [row] = derived([window_of([(RequestOutcome.SUCCESS, latency)])]).facts
    assert row["histogram"][-1] == 1


def test_no_windows_at_all_are_no_rows() -> None:
    places, none = columns.grouped(columns.from_windows([]), np.array([], np.int64))
    assert (len(places), len(none), none.facts.dtype) == (0, 0, FACTS)
    assert read_back(none).encoded() == read_back(none).encoded_more() == []
