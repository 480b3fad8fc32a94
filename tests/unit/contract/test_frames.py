"""Metrics become frames: of a job by step, of a deployment by bucket, whatever a server leaves out."""

import math
from typing import Any

import pandas as pd

from tuneship.contract.metrics import EXAMPLE_METRICS, DeploymentMetrics
from tuneship.contract.reports.job_reports import JobMetrics
from tuneship.gates.training.frames import read_curve

JOB: dict[str, Any] = {
    "job_id": "ft_1",
    "steps": [10, 20],
    "training_loss": [2.0, 1.5],
    "validation_loss": [None, 1.75],
    "learning_rate": [0.1, 0.05],
    "epochs": [0.5, 1.0],
    "accuracy": [None, None],
    "perplexity": [None, 5.75],
    "created_at": "2026-01-01T00:00:00Z",
}


def test_a_jobs_metrics_are_a_frame_by_step() -> None:
    frame = JobMetrics.model_validate(JOB).frame()
    assert frame.index.name == "step"
    assert list(frame.index) == [10, 20]
    assert frame.loc[20, "validation_loss"] == 1.75
    assert math.isnan(frame.loc[10, "validation_loss"])
    assert set(frame.dtypes) == {pd.Series([1.0]).dtype}


def test_the_gates_read_the_same_frame() -> None:
    pd.testing.assert_frame_equal(JobMetrics.model_validate(JOB).frame(), read_curve(JOB).frame)


def test_a_job_without_steps_has_a_frame_without_rows() -> None:
    empty = {name: [] if isinstance(value, list) else value for name, value in JOB.items()}
    assert JobMetrics.model_validate(empty).frame().shape == (0, 6)


def deployment(**series: dict[str, Any]) -> pd.DataFrame:
    return DeploymentMetrics.model_validate({**EXAMPLE_METRICS, "metrics": series}).frame()


def test_a_deployments_metrics_are_a_frame_by_bucket() -> None:
    frame = DeploymentMetrics.model_validate(EXAMPLE_METRICS).frame()
    assert str(frame.index[0]) == "2026-03-01 12:00:00+00:00"
    row = frame.iloc[0]
    assert (row["latency_p95"], row["throughput_requests_per_second"]) == (77.0, 1.0)
    assert (row["error_rate_request_count"], row["token_usage_output"]) == (600, 5400)
    assert list(frame["complete"]) == [True]
    assert not [name for name in frame if "histogram" in name or "timestamps" in name]


def test_series_with_times_of_their_own_are_joined() -> None:
    early, late = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
    frame = deployment(
        latency={"timestamps": [late, None], "complete": [False, True], "p50": [7.0, 8.0]},
        error_rate={"timestamps": [early, late, late], "error_count": [0, None, 3]},
    )
    assert [moment.minute for moment in frame.index] == [0, 1]
    assert [str(value) for value in frame["latency_p50"]] == ["nan", "7.0"]
    assert list(frame["error_rate_error_count"]) == [0.0, 3.0]
    assert list(frame["complete"]) == [True, False]


def test_a_deployment_without_series_has_a_frame_without_rows() -> None:
    assert deployment().empty
    assert deployment(latency={}).shape[0] == 0
