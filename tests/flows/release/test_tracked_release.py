"""A release writes itself into its trackers at its end, and a tracker that is down changes nothing but the result."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from flows.forms.release_form import ReleaseParameters
from flows.release.reports.tracked import chosen_trackers
from flows.rollout.result import RolloutResult
from flows.rollout.tracked import track_rollout
from flows.shared.errors import BadInput
from flows.shift_traffic import shift_traffic
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.conftest import plan
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.whole_service import WholeService
from tests.support.waiting import free_port
from tuneship.tracking.tracked_run import TrackedRelease

pytestmark = pytest.mark.prefect


def wanted(folder: Path, **tracking: Any) -> ReleaseParameters:
    file = write(folder / "data" / "secret-name.jsonl", 0, 80)
    fields = release(folder, files=[str(file)]).model_dump(exclude_unset=True)
    return ReleaseParameters.model_validate(fields | {"tracking": tracking})


def texts(events: EventAccumulator, name: str) -> str:
    return "".join(make_ndarray(one.tensor_proto).item().decode() for one in events.Tensors(name))


@pytest.mark.slow
def test_a_promoted_release_is_written_although_one_tracker_is_down(
    service: WholeService, tmp_path: Path
) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    parameters = wanted(tmp_path, mlflow_url=down, tensorboard_dir=str(tmp_path / "logs"))

    result = tune_and_deploy(parameters)

    assert result.outcome == "promoted"
    by_name = {one.tracker: one for one in result.tracking}
    assert by_name["mlflow"].place is None
    assert by_name["mlflow"].problem
    file = Path(by_name["tensorboard"].place or "")
    assert file.parent == tmp_path / "logs" / str(result.job_id)
    events = EventAccumulator(str(file.parent), size_guidance={"tensors": 0})
    events.Reload()
    assert len(events.Tensors("training_loss")) == 4
    about = texts(events, "tuneship/run")
    assert "| outcome | `promoted` |" in about
    trained_on = service.datasets[service.jobs[str(result.job_id)]["dataset_id"]]
    assert trained_on["tags"]["content_sha256"] in about
    assert "secret-name" not in about + texts(events, "release/report")
    assert f"# Release of {parameters.model_name}: promoted" in texts(events, "release/report")


def test_trackers_make_no_other_release(tmp_path: Path) -> None:
    plain, tracked = wanted(tmp_path), wanted(tmp_path, tensorboard_dir="logs")
    assert plain.digest() == tracked.digest()


def test_a_release_chooses_what_the_settings_of_the_worker_leave_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_MLFLOW_URL", "http://worker:5000")
    monkeypatch.setenv("TUNESHIP_MLFLOW_EXPERIMENT", "of the worker")
    settings = wanted(tmp_path, mlflow_experiment="mine", wandb_dir="runs").tracking.settings
    assert settings.mlflow_url == "http://worker:5000"
    assert (settings.mlflow_experiment, settings.wandb_dir) == ("mine", Path("runs"))


@pytest.mark.parametrize(
    ("setting", "value"), [("TRACKING_TIMEOUT_S", "soon"), ("MLFLOW_URL", "http://me:secret@host")]
)
def test_a_wrong_setting_is_named_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setenv(f"TUNESHIP_{setting}", value)
    with pytest.raises(BadInput, match=f"TUNESHIP_{setting}") as refused:
        chosen_trackers(wanted(tmp_path).tracking)
    assert value not in str(refused.value)


@pytest.mark.parametrize(("outcome", "serving"), [("promoted", "new"), ("rolled_back", "old")])
def test_a_rollout_of_its_own_says_which_model_serves(
    service: WholeService, monkeypatch: pytest.MonkeyPatch, outcome: str, serving: str
) -> None:
    monkeypatch.setenv("TUNESHIP_TENSORBOARD_DIR", "unused")
    models = {"old": "ft:tuneship-tiny:a:old", "new": "ft:tuneship-tiny:a:new"}
    seen: list[tuple[str, TrackedRelease]] = []
    monkeypatch.setattr("flows.rollout.tracked._model_of", models.__getitem__)
    monkeypatch.setattr(
        "flows.rollout.tracked.track", lambda _, job, release: seen.append((job, release)) or []
    )
    rollout = plan(baseline_deployment_id="old", candidate_deployment_id="new")
    track_rollout(rollout, RolloutResult(outcome=outcome, reason="none", rollout_id="rollout-1"))  # pyright: ignore[reportArgumentType]
    [(job, release)] = seen
    assert (job, release.serving) == ("ft_new", models[serving])


@pytest.mark.slow
def test_a_rollout_whose_trackers_are_wrong_ends_as_it_would(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_MLFLOW_URL", "no address")
    assert shift_traffic(plan()).outcome == "promoted"
