"""Rollouts that measure their traffic first: their forecast, their refusals, and the steps they choose."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.forms.plan_file import PlanFile
from flows.forms.release_form import ReleaseParameters
from flows.rollout import opening
from flows.rollout.record_file import RecordFolder
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import plan
from tests.flows.forms.test_parameters import release
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tuneship.contract.metrics import DeploymentMetrics

NAMES = {
    "endpoint_name": "shop",
    "baseline_deployment_id": BASELINE,
    "candidate_deployment_id": CANDIDATE,
}


def busy_for(fake: FakeService, minutes: int, per_minute: int) -> None:
    """Create the endpoint and let the baseline serve this traffic for so many minutes."""
    fake.requests_per_bucket = per_minute
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
    fake.tick(minutes)


@pytest.mark.prefect
@pytest.mark.slow
def test_a_roll_out_is_forecast_before_it_shifts_anything_and_resumes_with_its_chosen_steps(
    fake: FakeService, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy_for(fake, 30, 40)
    wanted = plan(steps="auto", on_inconclusive="pause", max_looks=8)

    paused = shift_traffic(wanted)

    assert paused.outcome == "paused"
    assert fake.patches[0].weights[CANDIDATE] == 15
    said = [one.getMessage() for one in caplog.records]
    forecast = next(i for i, one in enumerate(said) if one.startswith("forecast: at 40 requests"))
    assert forecast < next(i for i, one in enumerate(said) if one.startswith("split: candidate 15"))
    assert paused.forecast is not None
    (file,) = RecordFolder(records, fake.url).of(wanted)
    assert file.record.begun.plan["steps"] == [15, 25, 50, 75, 100]
    assert file.record.begun.endpoint_name == "shop"
    assert shift_traffic(wanted).rollout_id == paused.rollout_id


@pytest.mark.prefect
@pytest.mark.slow
def test_with_too_little_traffic_nothing_is_shifted(fake: FakeService, records: Path) -> None:
    busy_for(fake, 30, 2)

    wanted = plan(wait_for_traffic="1h")

    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("rejected", "too_little_traffic")
    assert fake.patches == []
    assert RecordFolder(records, fake.url).of(wanted) == []


@pytest.mark.prefect
@pytest.mark.slow
def test_a_plan_shorter_than_the_server_s_time_out_shifts_nothing(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_for(fake, 30, 600)
    ask = opening.get_deployment_metrics

    def with_long_timeout(*args: Any, **fields: Any) -> DeploymentMetrics:
        return ask(*args, **fields).model_copy(update={"generate_timeout_seconds": 1200.0})

    monkeypatch.setattr(opening, "get_deployment_metrics", with_long_timeout)

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rejected", "shorter_than_timeout")
    assert "after 300 s" in result.notes[0]
    assert "after 1200 s" in result.notes[0]
    assert fake.patches == []


def test_auto_steps_are_taken_by_plan_file_and_release() -> None:
    text = json.dumps({"plan": NAMES | {"steps": "auto"}})
    assert PlanFile.model_validate_json(text).steps == "auto"
    wanted = release(canary={"steps": "auto"})
    assert wanted.plan("cep_1", "dep_a", "dep_b").steps == "auto"
    assert ReleaseParameters.model_validate_json(wanted.model_dump_json()).canary.steps == "auto"
    assert release().plan("cep_1", "dep_a", "dep_b").bake_weight == 80


@pytest.mark.parametrize("steps", ["often", ["auto"], [50], 5])
def test_other_words_are_no_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps"):
        PlanFile.model_validate_json(json.dumps(NAMES | {"steps": steps}))


def test_a_rollout_that_is_refused_at_its_beginning_says_why(
    fake: FakeService, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.deleted.append(BASELINE)
    result = shift_traffic(plan())
    assert (result.outcome, result.reason) == ("aborted", "baseline_missing")
    said = [one.getMessage() for one in caplog.records]
    assert f"aborted (baseline_missing); baseline {BASELINE} is missing" in said
