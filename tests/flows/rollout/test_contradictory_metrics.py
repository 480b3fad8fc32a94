"""Rollouts whose service publishes counts that contradict each other: missing looks that are no evidence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.rollout.page import page
from flows.rollout.record_file import RecordFolder
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import plan
from tests.support.fakes.canary_service import (
    BASELINE,
    BUCKET,
    CANDIDATE,
    EPOCH,
    Arm,
    FakeService,
    as_text,
)

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

Series = dict[str, Any]
Spoil = Callable[[dict[str, Series], int], object]


def change(series: Series, new: Callable[[list[Any]], list[Any]]) -> None:
    """Change every column; the fake's series share some of them."""
    for name, values in series.items():
        series[name] = new(values)


def place(series: Series, bucket: int) -> int | None:
    stamp = as_text(EPOCH + bucket * BUCKET)
    return series["timestamps"].index(stamp) if stamp in series["timestamps"] else None


def serve_more_than_requested(metrics: dict[str, Series], bucket: int) -> None:
    if (i := place(metrics["throughput"], bucket)) is not None:
        metrics["throughput"]["requests_per_second"][i] *= 3


def leave_out_of_one_series(metrics: dict[str, Series], bucket: int) -> None:
    if (i := place(metrics["error_rate"], bucket)) is not None:
        change(metrics["error_rate"], lambda values: values[:i] + values[i + 1 :])


def give_two_rows(metrics: dict[str, Series], bucket: int) -> None:
    if (i := place(metrics["latency"], bucket)) is not None:
        change(metrics["latency"], lambda values: [*values, values[i]])


# The bucket that is spoilt, and what the look on it says.
FAULTS: dict[int, tuple[Spoil, str]] = {
    3: (serve_more_than_requested, "other numbers of requests in throughput and error_rate"),
    6: (leave_out_of_one_series, "requests in throughput that are not in error_rate"),
    9: (give_two_rows, "two rows for one bucket in latency"),
}


@pytest.mark.parametrize("arm", [BASELINE, CANDIDATE])
def test_contradictory_counts_are_missing_looks_until_they_are_sound_again(
    fake: FakeService, records: Path, arm: str
) -> None:
    """The spoilt buckets stay as they are, hold errors that would decide the rollout, and are never counted."""

    def spoil(name: str, metrics: dict[str, Series]) -> None:
        for bucket, (spoil_it, _) in FAULTS.items() if name == arm else ():
            spoil_it(metrics, bucket)

    fake.spoil = spoil
    fake.arms[CANDIDATE] = Arm(error_share=lambda bucket, _: 0.9 if bucket in FAULTS else 0.003)

    result = shift_traffic(plan(steps=[50, 100]))

    assert (result.outcome, result.reason) == ("promoted", "none")
    missing = [(one["verdict"], one["missing"]) for one in result.decisions if one.get("missing")]
    role = "baseline" if arm == BASELINE else "candidate"
    times = [f"{EPOCH + bucket * BUCKET:%H:%M:%S}" for bucket in FAULTS]
    [file] = RecordFolder(records, fake.url).of(plan())
    assert all(one[1] in page(file.record) for one in missing)
    assert missing == [
        ("hold", f"the counts of the {role} at {at} contradict each other: {why}")
        for at, (_, why) in zip(times, FAULTS.values(), strict=True)
    ]


def test_counts_that_stay_contradictory_end_the_rollout(fake: FakeService) -> None:
    def spoil(name: str, metrics: dict[str, Series]) -> None:
        for bucket in range(4, fake.ticks) if name == CANDIDATE else ():
            serve_more_than_requested(metrics, bucket)

    fake.spoil = spoil

    result = shift_traffic(plan(steps=[50, 100], missing_looks=5))

    assert (result.outcome, result.reason) == ("rolled_back", "metrics_unavailable")
    assert [bool(one.get("missing")) for one in result.decisions][-6:] == [False] + [True] * 5
