"""A real MLflow server: runs and versions are made once, and the alias stands at what serves."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.support.waiting import free_port, until
from tests.unit.tracking.runs import released, tracked, written_report
from tuneship.tracking.mlflow_tracker import CHAMPION, MlflowTracker
from tuneship.tracking.tracked_run import TrackingTarget

pytestmark = [pytest.mark.slow, pytest.mark.essential]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    own = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx.get(f"{url}/health", trust_env=False).is_success
        except httpx.HTTPError:
            return False

    try:
        until(is_ready)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def client(server: str) -> MlflowClient:
    return MlflowClient(tracking_uri=server, registry_uri=server)


def runs(client: MlflowClient, experiment: str) -> list[Run]:
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def champion(client: MlflowClient, name: str) -> str | None:
    version = client.get_registered_model(name).aliases.get(CHAMPION)
    return client.get_model_version(name, version).tags["tuneship.model"] if version else None


def test_a_run_that_is_written_again_is_completed_and_not_doubled(
    server: str, client: MlflowClient, tmp_path: Path
) -> None:
    tracker = MlflowTracker(TrackingTarget(tracker="mlflow", place=server, group="once"))
    run = tracked(model_name="once")
    first = tracker.write(run)
    release = released("promoted", run.model, written_report(tmp_path / "report"))
    whole = run.model_copy(update={"release": release})
    assert {tracker.write(whole), tracker.write(whole)} == {first}

    [logged] = runs(client, "once")
    assert logged.info.status == "FINISHED"
    assert logged.info.run_id in first
    assert logged.data.params == {
        "base_model": "tuneship-tiny",
        "hyperparameters.learning_rate": "0.01",
    }
    losses = client.get_metric_history(logged.info.run_id, "training_loss")
    assert sorted((one.step, one.value) for one in losses) == [(1, 2.0), (2, 1.5), (3, 1.25)]
    gate = client.get_metric_history(logged.info.run_id, "gate/T4 champion/value")
    assert [one.value for one in gate] == [0.5]
    inputs = [
        (one.dataset.name, one.dataset.digest, one.tags[0].value)
        for one in logged.inputs.dataset_inputs
    ]
    assert sorted(inputs) == [("ds_a", "a" * 36, "training"), ("ds_v", "b" * 36, "validation")]
    files = client.list_artifacts(logged.info.run_id, "release")
    assert sorted(one.path for one in files) == [
        "release/loss.png",
        "release/model_card.json",
        "release/model_card.md",
        "release/report.md",
    ]
    assert logged.data.tags["tuneship.outcome"] == "promoted"
    [version] = client.search_model_versions("name = 'once'")
    assert version.run_id == logged.info.run_id


def test_the_alias_moves_with_a_promotion_and_back_with_a_rollback(
    server: str, client: MlflowClient
) -> None:
    tracker = MlflowTracker(TrackingTarget(tracker="mlflow", place=server, group="moves"))
    old, new = (tracked(job, model_name="moves") for job in ("ft_old", "ft_new"))

    def end(run: str, outcome: str, serving: str | None) -> str | None:
        which = {"old": old, "new": new}[run]
        tracker.write(which.model_copy(update={"release": released(outcome, serving)}))
        return champion(client, "moves")

    assert end("old", "promoted", old.model) == old.model
    assert end("new", "paused", None) == old.model
    assert end("new", "promoted", new.model) == new.model
    assert end("new", "rolled_back", old.model) == old.model
    assert end("old", "promoted", "tuneship-tiny") is None, "a base model serves"
    assert len(client.search_model_versions("name = 'moves'")) == 2


def test_a_training_that_failed_is_a_failed_run_without_a_version(
    server: str, client: MlflowClient
) -> None:
    tracker = MlflowTracker(TrackingTarget(tracker="mlflow", place=server, group="failed"))
    tracker.write(tracked("ft_failed", model_name="failed", status="failed", model=None))
    [logged] = runs(client, "failed")
    assert logged.info.status == "FAILED"
    assert not client.search_model_versions("name = 'failed'")
