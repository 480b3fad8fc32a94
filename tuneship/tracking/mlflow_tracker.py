"""MLflow: a run for each training, with its datasets as inputs, and a version of the registered model.

The alias `champion` stands at the version whose model serves: a promotion moves it, and a rollback moves it back. A run
is found by its tag, a version by the id of its model, so both are made once.
"""

import json
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    Metric,
    Param,
    Run,
    RunStatus,
    RunTag,
)
from mlflow.entities.model_registry import ModelVersion
from mlflow.environment_variables import (
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
)
from mlflow.exceptions import MlflowException

from tuneship.tracking.tracked_run import TrackedRelease, TrackedRun, TrackingTarget

CHAMPION = "champion"
JOB_TAG = "tuneship.job"
MODEL_TAG = "tuneship.model"
OUTCOME_TAG = "tuneship.outcome"
RELEASE_TAG = "tuneship.release"
# MLflow's own limits: metrics of one call, characters of a dataset's digest.
METRICS_A_CALL = 1000
DIGEST_CHARACTERS = 36
# MLflow's own defaults would keep trying for minutes.
RETRIES = 1
REQUEST_TIMEOUT_S = 15


class MlflowTracker:
    """Writes into one experiment of an MLflow server, and into its model registry."""

    def __init__(self, target: TrackingTarget) -> None:
        """Use the server; nothing is sent yet."""
        for setting, value in (
            (MLFLOW_HTTP_REQUEST_MAX_RETRIES, RETRIES),
            (MLFLOW_HTTP_REQUEST_TIMEOUT, REQUEST_TIMEOUT_S),
        ):
            if not setting.is_set():
                setting.set(value)
        self._server = target.place.rstrip("/")
        self._experiment = target.group
        self._client = MlflowClient(tracking_uri=target.place, registry_uri=target.place)

    def write(self, run: TrackedRun) -> str:
        """Write the run, register its model, and move the alias where a release says what serves."""
        experiment_id = self._experiment_id()
        known = self._client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{run.job_id}'")
        logged = next(iter(known), None) or self._client.create_run(
            experiment_id,
            start_time=_ms(run.started_at),
            tags={JOB_TAG: run.job_id},
            run_name=f"{run.model_name} {run.job_id}",
        )
        run_id = logged.info.run_id
        self._log_training(run_id, run)
        if run.release is not None:
            self._log_release(run_id, run.release)
        if run.model is not None:
            self._register(logged, run, run.model)
        if run.release is not None and run.release.serving is not None:
            version = self._version(run.release.serving, run.model_name)
            if version is not None:
                self._client.set_registered_model_alias(
                    run.model_name, CHAMPION, str(version.version)
                )
            # Without a version of the model that serves, no version of this name serves.
            elif CHAMPION in self._client.get_registered_model(run.model_name).aliases:
                self._client.delete_registered_model_alias(run.model_name, CHAMPION)
        is_whole = run.status == "completed"
        status = RunStatus.FINISHED if is_whole else RunStatus.FAILED
        self._client.set_terminated(run_id, RunStatus.to_string(status), _ms(run.ended_at))
        return f"{self._server}/#/experiments/{experiment_id}/runs/{run_id}"

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(self._experiment)
        except MlflowException as error:
            # Another release has made it in the meantime.
            found = self._client.get_experiment_by_name(self._experiment)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                raise
            return found.experiment_id

    def _log_training(self, run_id: str, run: TrackedRun) -> None:
        params = [Param(name, str(value)) for name, value in run.parameters.items()]
        self._client.log_batch(run_id, params=params)
        # The server stores an equal point once, so the curves of a run that was cut off are completed.
        points = [Metric(name, value, _ms(at), step) for name, step, value, at in run.points()]
        for start in range(0, len(points), METRICS_A_CALL):
            self._client.log_batch(run_id, metrics=points[start : start + METRICS_A_CALL])
        inputs = [
            DatasetInput(
                Dataset(
                    name=one.id,
                    digest=one.digest[:DIGEST_CHARACTERS],
                    source_type="tuneship",
                    source=json.dumps({"dataset_id": one.id, "sha256": one.digest}),
                    profile=json.dumps({"num_rows": one.examples}),
                ),
                [InputTag("mlflow.data.context", one.context)],
            )
            for one in run.datasets
        ]
        if inputs:
            self._client.log_inputs(run_id, inputs)

    def _log_release(self, run_id: str, release: TrackedRelease) -> None:
        at = _ms(datetime.now().astimezone())
        known = self._client.get_run(run_id)
        measures = [
            Metric(name, value, at, 0)
            for name, value in release.measures.items()
            if known.data.metrics.get(name) != value
        ]
        tags = {RELEASE_TAG: release.run_key, OUTCOME_TAG: release.outcome}
        tags |= {f"tuneship.gate.{name}": state for name, state in release.gates.items()}
        tags["tuneship.reason"] = release.reason
        self._client.log_batch(
            run_id, metrics=measures, tags=[RunTag(name, value) for name, value in tags.items()]
        )
        for file in release.files:
            self._client.log_artifact(run_id, str(file), "release")

    def _register(self, logged: Run, run: TrackedRun, model: str) -> ModelVersion:
        """The version of this model, made once; its files stay at the service, the version says where to ask."""
        try:
            self._client.create_registered_model(run.model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = self._version(model, run.model_name)
        if version is None:
            with TemporaryDirectory() as folder:
                card = Path(folder) / "tuneship.json"
                card.write_text(json.dumps({"model": model, "job_id": run.job_id}) + "\n")
                self._client.log_artifact(logged.info.run_id, str(card), "model")
            version = self._client.create_model_version(
                run.model_name,
                f"{logged.info.artifact_uri}/model",
                run_id=logged.info.run_id,
                tags={MODEL_TAG: model, JOB_TAG: run.job_id},
            )
        if run.release is not None:
            outcome = run.release.outcome
            self._client.set_model_version_tag(
                run.model_name, str(version.version), OUTCOME_TAG, outcome
            )
        return version

    def _version(self, model: str, name: str) -> ModelVersion | None:
        wanted = f"name = '{name}' and tags.`{MODEL_TAG}` = '{model}'"
        return next(iter(self._client.search_model_versions(wanted)), None)


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def tracker(target: TrackingTarget) -> MlflowTracker:
    """The tracker of a server."""
    return MlflowTracker(target)
