"""The tables, curves and loads that reports and pages show of a rollout and of a training."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.unit.gates.rollouts import START, Rollout, Steady, plan_with
from tuneship.contract.reports.job_reports import JobMetrics
from tuneship.gates.gate_types import GateReading, ThresholdReading
from tuneship.gates.metrics.series import ArmTraffic, Bucket, RolloutSeries
from tuneship.gates.record import Begun, Ended, RolloutRecord
from tuneship.gates.reports.curves import arm_curve, evaluations, smoothed
from tuneship.gates.reports.rollout_facts import facts_of
from tuneship.gates.reports.split_history import Change, history_of
from tuneship.gates.reports.step_load import ArmLoad, explained, load_table, loads_by_step
from tuneship.gates.reports.tables import (
    LOOKS_SHOWN,
    evidence_table,
    gate_table,
    look_table,
    threshold_table,
)

BUCKET_SECONDS = 10


def series_of(*traffic: tuple[ArmTraffic, ArmTraffic]) -> RolloutSeries:
    """Buckets of ten seconds; each pair is the baseline and the candidate."""
    buckets = tuple(
        Bucket(START + timedelta(seconds=BUCKET_SECONDS * (n + 1)), *pair)
        for n, pair in enumerate(traffic)
    )
    end = buckets[-1].end
    return RolloutSeries(buckets, end, {}, {})


def served(requests: int, p95: float, errors: int = 0) -> ArmTraffic:
    return ArmTraffic(requests, errors, quantiles_ms=(p95 / 2, p95, 2 * p95))


def changed(share: int, seconds: float | None) -> Change:
    at = None if seconds is None else START + timedelta(seconds=seconds)
    return Change(at=at, weights={"dep_b": 100 - share, "dep_c": share}, why="advance")


def metrics_of(*losses: float | None) -> JobMetrics:
    return JobMetrics.model_construct(
        steps=list(range(1, len(losses) + 1)), validation_loss=list(losses)
    )


def test_the_history_has_every_confirmed_split_with_its_reason() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    rollout.run()
    begun, *rest = rollout.record.facts
    assert isinstance(begun, Begun)
    whole = replace(begun, plan=plan_with().model_dump(mode="json"))
    history = history_of(RolloutRecord((whole, *rest, Ended("promoted", "none"))))
    shares = [change.weights["dep_c"] for change in history]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert all(sum(change.weights.values()) == 100 for change in history)


def test_stretches_are_pooled_by_their_requests() -> None:
    nothing = ArmTraffic()
    series = series_of(
        (served(10, 100.0), nothing),
        (served(30, 200.0, errors=10), nothing),
        (nothing, nothing),
        (ArmTraffic(4, 4), nothing),
    )
    first, last = arm_curve(series, "baseline", 2 * BUCKET_SECONDS)
    assert (first.at, first.error_percent, first.p95_ms) == (series.buckets[0].end, 25.0, 175.0)
    assert first.p50_ms == 87.5
    assert (last.at, last.error_percent) == (series.buckets[2].end, 100.0)
    assert math.isnan(last.p95_ms), "no answer came, so none took a time"
    assert arm_curve(series, "candidate", BUCKET_SECONDS) == []


def test_repeated_losses_are_one_evaluation() -> None:
    assert evaluations(metrics_of(None, 2.0, 2.0, None, 1.5, 2.0)) == [(2, 2.0), (5, 1.5), (6, 2.0)]


def test_a_moving_mean_follows_new_values_and_passes_gaps() -> None:
    means = smoothed([None, 4.0, None, 1.0, 1.0], 2)
    assert math.isnan(means[0])
    assert means[1:3] == pytest.approx([4.0, 4.0])
    assert 1.0 < means[4] < means[3] < 4.0


def test_loads_are_those_of_each_split_and_compared_where_they_are_alike() -> None:
    series = series_of(
        (served(100, 200.0), served(100, 210.0)), (served(0, 1.0), served(200, 300.0))
    )
    loads = loads_by_step([changed(50, 0), changed(100, BUCKET_SECONDS)], series, "dep_c")
    assert [load.share for load in loads] == [50, 100]
    assert loads[0].candidate == ArmLoad(10.0, 210.0)
    assert loads[1].baseline == ArmLoad(0.0, None)
    text = explained(loads)
    assert "at 50 % the candidate answered 10.0 requests/s with a p95 of 210 ms" in text
    assert "At 100 % the candidate has all the load, 20.0 requests/s" in text
    assert load_table(loads).rows[1] == ["100 %", "20.0", "300 ms", "-", "-"]


def test_without_metrics_or_times_no_loads_are_known() -> None:
    series = series_of((served(1, 1.0), served(1, 1.0)))
    assert loads_by_step([changed(50, 0)], None, "dep_c") == []
    assert loads_by_step([changed(50, None)], series, "dep_c") == []
    assert loads_by_step([changed(50, 99)], series, "dep_c") == [], "it ended after the metrics"
    assert explained([]) == ""


def test_every_limit_stands_beside_its_value() -> None:
    gate = GateReading(
        name="error", state="open", candidate_requests=200, candidate_bad=3,
        baseline_requests=100, baseline_bad=1, candidate_share=0.015, baseline_share=0.01,
        ratio_limit=2.0, log_e_ok=900.0, log_e_ok_limit=0.0, z=None, z_limit=4.0,
    )  # fmt: skip
    off = GateReading(name="slow", state="disabled")
    whole, few = gate_table([gate, off]), evidence_table([gate, off])
    counts = ["3/200 = 1.50 %", "1/100 = 1.00 %"]
    assert whole.rows[0] == ["error", "open", *counts, "1.5 (2)", "-", "inf (1)", "- (4)"]
    assert whole.rows[1] == ["slow", "disabled", *["-"] * 6]
    assert few.rows == [["error: open", *counts, "inf (1)"]]
    assert len(whole.titles) == len(whole.rows[0])
    assert len(few.titles) == len(few.rows[0])


def test_a_threshold_that_is_exceeded_is_stressed() -> None:
    above, below = (
        ThresholdReading(name, reason=name, limit=5.0, value=value, requests=9)
        for name, value in (("error_rate", 6.0), ("latency", 4.0))
    )
    table = threshold_table([below, above])
    assert table.rows == [["latency", "4 (5)", 9], ["error_rate", "6 (5)", 9]]
    assert table.stressed == {1}


def test_the_facts_of_a_result_follow_from_the_record_alone() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    rollout.run()
    begun, *rest = rollout.record.facts
    assert isinstance(begun, Begun)
    record = RolloutRecord((replace(begun, plan=plan_with().model_dump(mode="json")), *rest))
    found = facts_of(record)
    assert [one["look"] for one in found["decisions"]] == [one.number for one in record.looks]
    assert {gate["name"] for gate in found["gates"]} == {gate.name for gate in begun.gates}
    active = {gate.name for gate in begun.gates if gate.state == "active"}
    assert all(set(one["gates"]) <= active for one in found["decisions"])
    assert all("why" in one for one in found["gates"] if one["state"] == "disabled")
    assert found["in_words"]
    assert (found["approval"], found["approval_asked_at"], found["driver"]) == (None, None, None)


def test_the_latest_of_many_looks_are_shown() -> None:
    look = Rollout(plan_with(), Steady()).begin().look()
    looks = [replace(look, number=number) for number in range(1, LOOKS_SHOWN + 4)]
    first, second, *_, last = look_table(looks).rows
    assert first[3] == "3 earlier checks"
    assert (second[0], last[0]) == (4, LOOKS_SHOWN + 3)
    assert len(look_table([look]).rows) == 1
