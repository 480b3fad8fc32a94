"""Before the first shift: the measured traffic, the forecast made from it, refused plans, and `steps: auto`."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flows.release.reports.report import report
from flows.rollout.expectations import Before, Expected, expect
from flows.rollout.page import page
from flows.rollout.result import RolloutResult, result_of
from tests.flows.release.test_report import RELEASE, refused
from tests.unit.gates.drawn import PUBLISHED
from tests.unit.gates.rollouts import lines_of, plan_with
from tuneship.contract.metrics import DeploymentMetrics, MetricSeries, MetricSummary
from tuneship.gates.metrics.series import ARMS, ArmTraffic, Bucket, InFlightAges, RolloutSeries
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.readings import choose_gates
from tuneship.gates.record import Begun, Ended, RolloutRecord, from_lines
from tuneship.gates.reports.words import forecast_in_words

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
DRIVER = {"prompts": "p.jsonl", "requests_per_second": 5.0}


def answer(generate_timeout_s: float | None = None) -> DeploymentMetrics:
    return DeploymentMetrics(
        deployment_id="dep_b",
        start_time=NOW,
        end_time=NOW,
        interval="1m",
        metrics=MetricSeries(),
        summary=MetricSummary(),
        generate_timeout_seconds=generate_timeout_s,
    )


def hour(per_minute: int, minutes: int = 60, *, failed: int = 0, ages: bool = False) -> Before:
    """The last minutes of the baseline, with the same traffic in each."""
    ends = [NOW - timedelta(minutes=back) for back in reversed(range(minutes))]
    buckets = tuple(
        Bucket(end, ArmTraffic(requests=per_minute, errors=failed), ArmTraffic()) for end in ends
    )
    snapshot = InFlightAges((1000.0, 20000.0), (0, 0)) if ages else None
    series = RolloutSeries(
        buckets,
        NOW,
        dict.fromkeys(ARMS, NOW),
        dict.fromkeys(ARMS),
        in_flight={"baseline": snapshot},
    )
    return Before(answer(), series)


def expected_from(before: Before, **fields: Any) -> Expected | RolloutResult:
    plan = plan_with(bake_weight=95, **fields)
    return expect(plan, before, choose_gates(plan, PUBLISHED), "cep_1")


def begun_with(expected: Expected) -> Begun:
    plan = expected.plan
    return Begun(
        "r",
        "cep_1",
        plan.model_dump(mode="json"),
        plan.digest(),
        choose_gates(plan, PUBLISHED),
        today=expected.today,
        forecast=expected.forecast,
        warnings=expected.warnings,
    )


def test_enough_traffic_is_forecast_on_the_page_and_in_result_and_report() -> None:
    expected = expected_from(hour(600))
    assert isinstance(expected, Expected)
    assert expected.warnings == ()
    begun = begun_with(expected)
    (line,) = from_lines(lines_of([begun])).facts
    assert line == begun

    sentences = forecast_in_words(begun)
    assert sentences[0] == (
        "at 600 requests a minute about 20 minutes to promote an equal candidate, then 33 minutes of bake"
    )
    assert any(one.startswith("five points more errors are found within") for one in sentences)
    result = result_of(RolloutRecord((begun, Ended("aborted", "cancelled"))), [])
    assert result.forecast is not None
    assert result.forecast["in_words"] == sentences
    assert result.forecast["promote_minutes"] == 20.0
    text = report(refused().model_copy(update={"forecast": result.forecast}), RELEASE, [])
    for one in sentences:
        assert f"- {one}" in page(RolloutRecord((begun,)))
        assert f"- {one}" in text


def test_a_record_without_a_forecast_tells_of_none() -> None:
    begun = Begun("r", "cep_1", plan_with().model_dump(mode="json"), "", ())
    assert forecast_in_words(begun) == []
    assert result_of(RolloutRecord((begun, Ended("aborted", "cancelled"))), []).forecast is None
    assert "Forecast" not in page(RolloutRecord((begun,)))


def test_too_little_traffic_is_refused_before_anything_is_shifted() -> None:
    refusal = expected_from(hour(2))
    assert isinstance(refusal, RolloutResult)
    assert (refusal.outcome, refusal.reason) == ("rejected", "too_little_traffic")
    (note,) = refusal.notes
    assert note.startswith("at 2 requests a minute not even an equal candidate is promoted")
    assert "`traffic`" in note
    assert "`on_little_traffic: go_on`" in note


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"on_little_traffic": "go_on"}, "returns the traffic"),
        ({"on_inconclusive": "pause"}, "pauses for a person"),
    ],
)
def test_a_plan_may_go_on_with_little_traffic_and_is_warned(
    fields: dict[str, str], end: str
) -> None:
    expected = expected_from(hour(2), **fields)
    assert isinstance(expected, Expected)
    (warning,) = expected.warnings
    assert end in warning


def test_traffic_that_has_just_begun_refuses_nothing() -> None:
    expected = expected_from(hour(2, minutes=5))
    assert isinstance(expected, Expected)
    assert len(expected.warnings) == 1


def night() -> Before:
    """Nobody asked in the last hour; yesterday 300 requests a minute came from three hours later on."""
    ends = [NOW - timedelta(hours=back) for back in reversed(range(24))]
    rates = [0] * 3 + [300 * 60] * 12 + [0] * 9
    buckets = tuple(
        Bucket(end, ArmTraffic(requests=requests), ArmTraffic())
        for end, requests in zip(ends, rates, strict=True)
    )
    day = RolloutSeries(buckets, NOW, dict.fromkeys(ARMS, NOW), dict.fromkeys(ARMS))
    return replace(hour(0), day=day)


def test_a_rollout_that_begins_at_night_is_forecast_into_the_morning() -> None:
    begun = expected_from(night(), wait_for_traffic="12h")
    assert isinstance(begun, Expected)
    assert begun.forecast is not None
    assert begun.forecast.promote_minutes == pytest.approx(180 + 20, abs=10)
    assert begun.warnings == ()
    assert forecast_in_words(begun_with(begun))[0].startswith(
        "at 0 requests a minute now and 300 requests a minute in the busiest hour of a day about 3.4 hours"
    )
    refused_at_once = expected_from(night(), wait_for_traffic="2h")
    assert isinstance(refused_at_once, RolloutResult)


def test_auto_steps_fit_the_morning_that_a_night_waits_for() -> None:
    expected = expected_from(night(), steps="auto", wait_for_traffic="12h")
    assert isinstance(expected, Expected)
    assert expected.plan.steps == [5, 25, 50, 75, 100]


def test_hours_before_the_deployment_s_first_request_say_nothing() -> None:
    day = night().day
    assert day is not None
    late = replace(day, buckets=day.buckets[-2:] + day.buckets[:-2])
    begun = expected_from(replace(hour(40), day=late))
    assert isinstance(begun, Expected)
    assert begun.today is not None
    assert begun.today.by_hour[:5] == (40.0,) * 5
    assert begun.today.by_hour[5] == 300.0


def test_a_server_with_coarse_counts_is_named_with_what_cannot_be_seen() -> None:
    busy = hour(600)
    assert busy.series is not None
    edges = (*(float(2**power) for power in range(13)), float("inf"))
    times = ArmTraffic(requests=600, histogram=(0,) * 9 + (300, 560, 599, 600, 600))
    buckets = tuple(replace(one, baseline=times) for one in busy.series.buckets)
    coarse = replace(busy.series, buckets=buckets, edges_ms=dict.fromkeys(ARMS, edges))
    expected = expected_from(replace(busy, series=coarse))
    assert isinstance(expected, Expected)
    assert "less than 3.3 times slower cannot be told" in expected.warnings[0]


def test_a_sick_baseline_is_no_lack_of_traffic() -> None:
    expected = expected_from(hour(600, failed=60))
    assert isinstance(expected, Expected)
    assert expected.forecast is not None
    assert expected.forecast.promote_minutes is None
    assert any("slo_max" in one for one in forecast_in_words(begun_with(expected)))


def test_without_known_traffic_nothing_is_forecast_and_a_warning_says_so() -> None:
    expected = expected_from(Before())
    assert isinstance(expected, Expected)
    assert expected.forecast is None
    assert "nothing can be forecast" in expected.warnings[0]


@pytest.mark.parametrize("before", [Before(), hour(2)])
def test_the_driver_s_own_load_counts(before: Before) -> None:
    expected = expected_from(before, traffic=DRIVER)
    assert isinstance(expected, Expected)
    assert expected.today is not None
    assert expected.today.requests_per_minute == 300.0
    assert expected.warnings == ()


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        (hour(600), [5, 25, 50, 75, 100]),
        (hour(24), [25, 50, 75, 100]),
        (Before(), [5, 25, 50, 75, 100]),
    ],
)
def test_auto_steps_are_plain_steps_before_the_record_begins(
    before: Before, steps: list[int]
) -> None:
    asked = plan_with(steps="auto", bake_weight=95)
    expected = expected_from(before, steps="auto", on_little_traffic="go_on")
    assert isinstance(expected, Expected)
    assert expected.plan.steps == steps
    recorded = CanaryPlan.model_validate(expected.plan.model_dump(mode="json"))
    assert recorded.steps == steps
    assert recorded.is_resumed_by(asked, asked.digest())
    assert not recorded.is_resumed_by(plan_with(steps=[50, 100]), asked.digest())


def with_timeout(before: Before, seconds: float) -> Before:
    return Before(answer(seconds), before.series)


QUICK = {"interval": "1s", "look_every_seconds": 1.0}


def test_a_plan_that_the_server_s_time_out_outruns_is_refused_with_both_numbers() -> None:
    refusal = expected_from(with_timeout(hour(600), 120.0), **QUICK)
    assert isinstance(refusal, RolloutResult)
    assert (refusal.outcome, refusal.reason) == ("rejected", "shorter_than_timeout")
    assert "over after 5 s" in refusal.notes[0]
    assert "only after 120 s" in refusal.notes[0]


def test_hanging_requests_are_a_warning() -> None:
    expected = expected_from(with_timeout(hour(600, ages=True), 120.0), **QUICK)
    assert isinstance(expected, Expected)
    (warning,) = expected.warnings
    assert "after 5 s" in warning
    assert warning.endswith("after 120 s; one that hangs counts against its deployment after 10 s")


@pytest.mark.parametrize("before", [hour(600), with_timeout(hour(600), 300.0)])
def test_steps_as_long_as_the_time_out_and_servers_that_do_not_tell_it_are_fine(
    before: Before,
) -> None:
    expected = expected_from(before)
    assert isinstance(expected, Expected)
    assert expected.warnings == ()


@pytest.mark.parametrize(("last", "weight"), [(75, 80), (80, 95), (97, None)])
def test_plans_bake_beside_the_baseline_where_their_steps_leave_it_traffic(
    last: int, weight: int | None
) -> None:
    fields = plan_with(steps=[50, last, 100]).model_dump(mode="json")
    del fields["bake_weight"]
    assert CanaryPlan.model_validate(fields).bake_weight == weight
