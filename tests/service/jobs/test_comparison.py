"""A job that asks for losses by row names another tuned model to be measured, and shows them once it has completed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.in_process import Service
from tuneship.contract.reports.job_reports import JobMetrics

pytestmark = pytest.mark.both_databases(postgres="soak")
Start = Callable[..., Service]
JOBS = "/v1/fine-tuning/jobs"
LOSSES: dict[str, Any] = {
    "rows": [1, 2],
    "judge": [True, False],
    "trained_on": [False, True],
    "start": [2.0, 3.0],
    "served": [1.0, None],
    "compared": [1.5, 1.25],
    "compared_model": "ft:tuneship-tiny:m:1",
}


def spec_of(service: Service, job_id: str) -> dict[str, Any]:
    return json.loads((service.trainer_of(job_id).folder / "spec.json").read_text())


def test_losses_by_row_are_shown_once_the_job_has_completed(service: Service) -> None:
    model = service.model()
    wanted = {"model": model, "seed": 7}
    job_id = service.job(comparison=wanted)
    assert service.call("GET", f"{JOBS}/{job_id}").json()["comparison"] == wanted
    spec = spec_of(service, job_id)
    assert (spec["comparison_seed"], spec["compared_model"]) == (7, model)
    assert (Path(spec["compared_adapter"]) / "adapter_model.safetensors").is_file()
    trainer = service.trainer_of(job_id)
    assert trainer.order.keys.compared != trainer.order.keys.adapter
    trainer.start_of(2)
    trainer.step(1, evaluated=True)
    trainer.say({"kind": "row_losses", "losses": LOSSES | {"served": [9.0, 9.0]}})
    trainer.say({"kind": "row_losses", "losses": LOSSES})
    service.until(lambda: service.call("GET", f"{JOBS}/{job_id}").json()["current_step"] == 1)
    assert "row_losses" not in service.call("GET", f"{JOBS}/{job_id}/metrics").json()
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    answer = service.call("GET", f"{JOBS}/{job_id}/metrics").json()
    assert answer["row_losses"] == LOSSES
    assert JobMetrics.model_validate(answer).model_dump(mode="json")["row_losses"] == LOSSES


def test_a_job_that_asks_for_none_gets_none(service: Service) -> None:
    job_id = service.job()
    spec = spec_of(service, job_id)
    assert (spec["comparison_seed"], spec["compared_adapter"]) == (None, None)
    assert "comparison" not in service.call("GET", f"{JOBS}/{job_id}").json()
    trainer = service.trainer_of(job_id)
    trainer.start_of(1)
    trainer.step(1, evaluated=True)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    assert "row_losses" not in service.call("GET", f"{JOBS}/{job_id}/metrics").json()


@pytest.mark.parametrize(
    ("model", "status"),
    [("tuneship-tiny", 422), ("ft:tuneship-tiny:m:0123456789abcdefghij", 404), ("theirs", 404)],
)
def test_a_model_that_cannot_be_compared_is_refused_by_its_place(
    service: Service, model: str, status: int
) -> None:
    if model == "theirs":
        model = service.model("bob")
    body = {
        "base_model": "tuneship-tiny",
        "dataset_id": service.dataset(),
        "model_name": "m",
        "comparison": {"model": model},
    }
    answer = service.call("POST", JOBS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "comparison.model")


def test_a_model_that_is_deleted_meanwhile_costs_the_comparison_alone(start: Start) -> None:
    service = start(concurrent_jobs=1)
    model = service.model()
    first = service.job()
    service.trainer_of(first)
    second = service.job(comparison={"model": model})
    assert service.call("DELETE", f"/v1/models/{model}").status_code == 200
    trainer = service.trainer_of(first)
    trainer.start_of(1)
    trainer.complete()
    assert spec_of(service, second)["compared_adapter"] is None
