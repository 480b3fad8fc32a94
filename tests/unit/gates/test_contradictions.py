"""Finer counts reach the series as they are published, and metrics that contradict each other are a missing look."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.gates.rollouts import START, Served, answer, moment
from tuneship.contract.metrics import CellCounts
from tuneship.gates.metrics.metrics_reader import _cells, read_series
from tuneship.gates.metrics.series import ArmTraffic, Unusable
from tuneship.gates.statistics.cells import NO_CELLS, Cells

# Three answers, then nothing, then one answer and an error.
ROWS = {
    0: Served(3, output=30.0, histogram=[0] * 8 + [1] + [3] * 5, cancelled=4, refused=2, callers=0),
    1: Served(),
    2: Served(2, 1, output=9.0, histogram=[0] * 9 + [1] * 5, cancelled=0, refused=0, callers=1),
}


def cells(index: list[list[int] | None], count: list[list[int] | None]) -> dict[str, Any]:
    return {"per_doubling": 16, "index": index, "count": count}


def published() -> dict[str, Any]:
    """Return the metrics of a service that publishes everything."""
    found = answer(ROWS, end=3)
    metrics = found["metrics"]
    metrics["latency"] |= {
        "cells": cells([[120, 130], [136]], [[1, 2], [1]]),
        "cells_per_token": cells([[50], None], [[3], None]),
    }
    metrics["token_usage"]["cells"] = cells([[50], [], [40]], [[3], [], [1]])
    metrics["error_rate"] |= {"cancelled_callers": [3, 0], "refused_callers": [1, None]}
    metrics["traffic"] = {
        "timestamps": [moment(0), moment(2)],
        "spread_keys": [1, 0],
        "callers_of_half": [2, None],
        "replicas": [2, None],
    }
    return found


def read(candidate: dict[str, Any]) -> list[ArmTraffic]:
    return [bucket.candidate for bucket in read_series(published(), candidate, "1m").buckets]


def test_finer_counts_are_read_as_they_are_published() -> None:
    first, quiet, last = read(published())
    assert first.cells == Cells((120, 130), (1, 2))
    assert first.cells_per_token == Cells((50,), (3,))
    assert first.token_cells == Cells((50,), (3,))
    assert (first.cancelled_callers, first.refused_callers) == (3, 1)
    assert (first.spread_keys, first.callers_of_half, first.replicas) == (1, 2, 2)
    # A bucket without an answer has none in any cell; null stands for not counted.
    assert (quiet.cells, quiet.token_cells) == (NO_CELLS, NO_CELLS)
    assert (last.cells, last.cells_per_token) == (Cells((136,), (1,)), None)
    assert (last.cancelled_callers, last.refused_callers, last.callers_of_half) == (0, None, None)


def test_a_server_without_finer_counts_is_read_as_before() -> None:
    first, *_ = read(answer(ROWS, end=3))
    finer = (first.cells, first.cells_per_token, first.token_cells, first.cancelled_callers)
    assert finer == (None, None, None, None)
    assert (first.spread_keys, first.callers_of_half, first.replicas) == (None, None, None)


def test_repeats_of_a_small_key_are_left_out() -> None:
    candidate = published()
    candidate["metrics"]["traffic"] |= {
        "repeated_requests": [0, 1],
        "repeated_errors": [0, 1],
        "repeated_empty": [0, 0],
        "repeated_cancelled": [3, 0],
        "repeated_refused": [1, None],
    }
    first, _, last = read(candidate)
    assert (first.requests, first.cancelled, first.refused) == (3, 1, 1)
    assert first.cancelled_callers == 1
    assert (last.requests, last.errors, last.error_callers) == (1, 0, 0)


def change(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(metrics: dict[str, Any]) -> None:
        place: Any = metrics
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return apply


def without_row(metric: str, index: int) -> Callable[[dict[str, Any]], None]:
    def apply(metrics: dict[str, Any]) -> None:
        series = metrics[metric]
        for name, values in series.items():
            if isinstance(values, list):
                series[name] = values[:index] + values[index + 1 :]
            elif name == "histogram":
                series[name] = values | {"counts": values["counts"][1:]}
            else:
                cells = {
                    key: values[key][:index] + values[key][index + 1 :]
                    for key in ("index", "count")
                }
                series[name] = values | cells

    return apply


def twice(metric: str) -> Callable[[dict[str, Any]], None]:
    def apply(metrics: dict[str, Any]) -> None:
        series = metrics[metric]
        for name, values in series.items():
            if isinstance(values, list):
                series[name] = [*values, values[0]]
        if metric == "latency":
            series["histogram"]["counts"].append(series["histogram"]["counts"][0])
            for name in ("cells", "cells_per_token"):
                series[name] = {
                    key: [*value, value[0]] if isinstance(value, list) else value
                    for key, value in series[name].items()
                }
        if metric == "token_usage":
            series["cells"] = {
                key: [*value, value[0]] if isinstance(value, list) else value
                for key, value in series["cells"].items()
            }

    return apply


# In the other contradictions it is the first bucket, or the whole answer.
IN_THE_LAST = (
    "more blank answers than answers",
    "more lengths than succeeded",
    "more in the histogram than succeeded",
)
OF_A_BUCKET = (
    "requests",
    "no requests",
    "a hundred",
    "two rows",
    "more errors",
    "more repeat",
    "more per",
)
CONTRADICTIONS = {
    "no requests beside a hundred": change("throughput", "requests_per_second", 0, to=100 / 60),
    "a hundred requests beside three": change("error_rate", "request_count", 0, to=100),
    "requests that throughput lacks": without_row("throughput", 0),
    "requests that error_rate lacks": without_row("error_rate", 0),
    "requests that latency lacks": without_row("latency", 0),
    "requests that token_usage lacks": without_row("token_usage", 0),
    "more errors than requests": change("error_rate", "error_count", 0, to=4),
    "more blank answers than answers": change("token_usage", "empty_count", 2, to=2),
    "more in the histogram than succeeded": change(
        "latency", "histogram", "counts", 1, to=[0] * 9 + [2] * 5
    ),
    "more in the cells than succeeded": change("latency", "cells", "count", 0, to=[2, 2]),
    "fewer in the cells than in the histogram": change("latency", "cells", "count", 0, to=[1, 1]),
    "more per token than succeeded": change("latency", "cells_per_token", "count", 0, to=[4]),
    "more lengths than succeeded": change("token_usage", "cells", "count", 2, to=[2]),
    "more repeats than requests": change("traffic", "repeated_requests", to=[4, 0]),
    "more repeated errors than errors": change("traffic", "repeated_errors", to=[1, 0]),
    **{f"two rows in {metric}": twice(metric) for metric in published()["metrics"]},
    "cells of another width": change("latency", "cells", "per_doubling", to=8),
    "cells that fall": change("latency", "cells", "index", 0, to=[130, 120]),
    "a cell without a value": change("latency", "cells", "count", 0, to=[0, 3]),
    "cells without their counts": change("latency", "cells", "count", 0, to=[3]),
    "cells of too few buckets": change("token_usage", "cells", "index", to=[[50], []]),
    "a negative number of keys": change("traffic", "spread_keys", 0, to=-1),
}


def spoilt(name: str, arm: str, end: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both answers, one of them spoilt, as they are after so many buckets."""
    wrong, sound = published(), published()
    CONTRADICTIONS[name](wrong["metrics"])
    wrong["end_time"] = sound["end_time"] = moment(end)
    return (wrong, sound) if arm == "baseline" else (sound, wrong)


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("arm", ["baseline", "candidate"])
def test_contradictory_metrics_are_a_missing_look_with_a_reason(name: str, arm: str) -> None:
    # The first bucket or the last one is spoilt; each is the newest once.
    end = 3 if name in IN_THE_LAST else 1
    with pytest.raises(Unusable, match=r"\w+ \w+"):
        read_series(*spoilt(name, arm, end), "1m")


@pytest.mark.parametrize("name", [name for name in CONTRADICTIONS if name.startswith(OF_A_BUCKET)])
@pytest.mark.parametrize("arm", ["baseline", "candidate"])
def test_a_contradictory_bucket_before_a_sound_one_is_left_out(name: str, arm: str) -> None:
    sound = read_series(published(), published(), "1m").buckets
    assert read_series(*spoilt(name, arm, 3), "1m").buckets == sound[1:]


def test_buckets_that_were_counted_are_not_read_again() -> None:
    answers = spoilt("more errors than requests", "candidate", 1)
    counted_until = START + timedelta(minutes=1)
    assert read_series(*answers, "1m", counted_until).buckets == ()


def test_contradictions_of_a_bucket_that_is_not_finished_are_not_looked_at() -> None:
    spoilt = published()
    spoilt["metrics"]["error_rate"]["request_count"][1] = 90
    spoilt["metrics"]["throughput"]["complete"][2] = False
    assert len(read(spoilt)) == 2


def test_one_request_more_or_one_in_a_hundred_is_no_contradiction() -> None:
    nearly = answer({0: Served(1_000, histogram=[0] * 9 + [1_000] * 5)}, end=1)
    for requests in (1_001, 1_009):
        nearly["metrics"]["throughput"]["requests_per_second"] = [requests / 60]
        [bucket] = read_series(nearly, nearly, "1m").buckets
        assert bucket.candidate.requests == 1_000
    nearly["metrics"]["throughput"]["requests_per_second"] = [1_020 / 60]
    with pytest.raises(Unusable, match="throughput and error_rate"):
        read_series(nearly, nearly, "1m")


def test_cells_beyond_all_times_make_a_missing_look() -> None:
    cells = {"per_doubling": 16, "index": [[10**9]], "count": [[1]]}
    with pytest.raises(Unusable, match="cell out of range"):
        _cells(CellCounts.model_validate(cells), "cells")
