"""Jobs are listed, resolve "auto", report their progress in events, and fail when they take too long."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import CATALOGUE, Service, jsonl
from tuneship.contract.errors import ValidationFailed
from tuneship.contract.jobs import Hyperparameters, JobMetrics
from tuneship.gates.training.divergence import DivergenceWatch, watch_training
from tuneship.gates.training.training_gates import FinishedJob, TrainingRules, judge_training
from tuneship.host import machine
from tuneship.service.models.hyperparameters import resolved
from tuneship.store.database import tables

pytestmark = pytest.mark.both_databases
Start = Callable[..., Service]
SUMMARY = {
    "id", "base_model", "model_name", "fine_tuned_model", "status", "created_at", "updated_at",
    "fine_tuning_method", "tags",
}  # fmt: skip
JOBS = "/v1/fine-tuning/jobs"


def names(answer: Any) -> list[str]:
    return [one["model_name"] for one in answer.json()["jobs"]]


def lines_of(number: int) -> bytes:
    return jsonl(*({"instruction": f"q{n}", "response": "a"} for n in range(number)))


def events_of(service: Service, job_id: str) -> list[tuple[str, dict[str, Any]]]:
    table = tables.events
    query = sa.select(table.c.type, table.c.data).where(table.c.resource_id == job_id)
    with service.database.read() as connection:
        found = connection.execute(query.order_by(table.c.sequence)).all()
    return [(kind.removeprefix("fine_tuning.job."), data) for kind, data in found]


def test_a_list_item_has_exactly_the_fields_of_a_summary(service: Service) -> None:
    service.model()
    service.job(model_name="young", tags={"team": "a"})
    page = service.call("GET", JOBS).json()
    assert set(page) == {"jobs", "pagination"}
    young, done = page["jobs"]
    assert set(young) == SUMMARY
    assert (young["model_name"], young["tags"], young["fine_tuned_model"]) == (
        "young",
        {"team": "a"},
        None,
    )
    assert set(done) == SUMMARY | {"completed_at"}
    assert done["fine_tuned_model"].startswith("ft:tuneship-tiny:m:")
    assert page["pagination"] == {"total": 2, "limit": 20, "offset": 0, "next_offset": None}


def test_jobs_are_listed_newest_first_in_pages_and_by_filter(service: Service) -> None:
    dataset = service.dataset()
    for name in ("a", "b", "c"):
        service.job(dataset_id=dataset, model_name=name, tags={"half": name})
    service.job("bob", model_name="theirs")
    first = service.call("GET", f"{JOBS}?limit=2")
    assert names(first) == ["c", "b"]
    following = first.json()["pagination"]["next_offset"]
    assert names(service.call("GET", f"{JOBS}?limit=2&offset={following}")) == ["a"]
    assert names(service.call("GET", f"{JOBS}?tags[half]=b")) == ["b"]
    assert names(service.call("GET", f"{JOBS}?base_model=tuneship-tiny&offset=2")) == ["a"]
    assert names(service.call("GET", f"{JOBS}?base_model=another")) == []
    service.until(lambda: len(service.engines.trainers) == 4)
    newest = service.call("GET", JOBS).json()["jobs"][0]["id"]
    service.call("POST", f"{JOBS}/{newest}/cancel")
    service.until(lambda: service.job_status(newest) in ("cancelling", "cancelled"))
    assert "c" not in names(service.call("GET", f"{JOBS}?status=running"))


def test_a_cancel_that_is_repeated_is_the_same_answer_and_no_event(service: Service) -> None:
    job_id = service.job()
    service.rest()
    first, second = (service.call("POST", f"{JOBS}/{job_id}/cancel") for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == second.json()
    assert first.json()["status"] == "cancelling"
    assert [kind for kind, _ in events_of(service, job_id) if kind != "started"] == ["queued"]


def test_a_null_in_a_create_counts_as_not_sent(shared: Service) -> None:
    body = {"base_model": "tuneship-tiny", "dataset_id": shared.dataset(), "model_name": "m"}
    nulls = dict.fromkeys(("validation_dataset_id", "fine_tuning_method", "tags", "compute_config"))
    deeper = {"hyperparameters": {"epochs": None, "lora_alpha": None}}
    records = [shared.call("POST", JOBS, json=body | more).json() for more in ({}, nulls | deeper)]
    for record in records:
        for own in ("id", "created_at", "updated_at"):
            del record[own]
    assert records[0] == records[1]


def test_auto_is_resolved_from_the_data_and_the_model_and_echoed(service: Service) -> None:
    dataset = service.dataset(content=lines_of(640))
    auto = dict.fromkeys(("learning_rate", "batch_size", "epochs", "warmup_steps"), "auto")
    answers = [
        service.call(
            "POST",
            JOBS,
            json={
                "base_model": "tuneship-tiny",
                "dataset_id": dataset,
                "model_name": "m",
                "hyperparameters": auto,
            },
        ).json()
        for _ in range(2)
    ]
    one, two = (answer["hyperparameters"] for answer in answers)
    assert one == two
    # A tenth of 640 is set aside, so an epoch has 576 / 16 = 36 steps, and the job has 108.
    assert (one["batch_size"], one["epochs"], one["warmup_steps"]) == (16, 3, 3)
    assert one["learning_rate"] == 1e-3
    got = service.call("GET", f"{JOBS}/{answers[0]['id']}").json()
    assert (got["hyperparameters"], got["total_epochs"]) == (one, 3)


@pytest.mark.parametrize(
    ("examples", "batch_size", "epochs"),
    [(1, 4, 25), (4, 4, 25), (34, 4, 3), (1000, 16, 3), (10_000, 32, 2), (30_000, 32, 1)],
)
def test_little_data_is_seen_more_often_and_much_less(
    examples: int, batch_size: int, epochs: int
) -> None:
    asked = Hyperparameters(batch_size="auto", epochs="auto", warmup_steps="auto")
    got = resolved(asked, examples=examples, has_validation_set=True, parameters=10**9)
    assert (got["batch_size"], got["epochs"]) == (batch_size, epochs)
    assert got["warmup_steps"] <= 100


def test_the_rate_meets_the_known_points_and_stays_within_its_bounds() -> None:
    def rate(parameters: float) -> Any:
        asked = Hyperparameters(learning_rate="auto")
        size = int(parameters)
        return resolved(asked, examples=9, has_validation_set=True, parameters=size)[
            "learning_rate"
        ]

    assert [rate(7e9), rate(33e9)] == [2e-4, 1e-4]
    assert [rate(1e3), rate(1e15)] == [1e-3, 5e-5]
    sizes = [rate(10.0**power) for power in range(5, 13)]
    assert sizes == sorted(sizes, reverse=True)


def test_the_warm_up_ends_with_the_job_at_the_latest() -> None:
    def warmed(steps: int) -> Any:
        asked = Hyperparameters(batch_size=4, epochs=2, warmup_steps=steps)
        return resolved(asked, examples=20, has_validation_set=False, parameters=1)

    assert warmed(10)["warmup_steps"] == 10  # 18 examples are learnt: 5 steps, twice
    with pytest.raises(ValidationFailed, match="at most the job's 10 steps"):
        warmed(11)


@pytest.mark.parametrize("method", ["full", "dpo"])
def test_a_method_that_is_not_trained_here_is_refused_with_what_is(
    shared: Service, method: str
) -> None:
    body = {"base_model": "tuneship-tiny", "dataset_id": shared.dataset(), "model_name": "m"}
    answer = shared.call("POST", JOBS, json=body | {"fine_tuning_method": method})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("validation_error", "fine_tuning_method")
    assert "this release trains LoRA" in error["message"]


def test_an_unknown_module_is_refused_with_the_modules_of_the_model(shared: Service) -> None:
    body = {"base_model": "tuneship-tiny", "dataset_id": shared.dataset(), "model_name": "m"}
    wanted = {"hyperparameters": {"target_modules": ["q_proj", "z_proj"]}}
    error = shared.call("POST", JOBS, json=body | wanted).json()["error"]
    assert all(name in error["message"] for name in CATALOGUE.default.linear_modules)
    assert "z_proj" not in error["message"]


def test_only_steps_that_were_measured_are_evidence(service: Service) -> None:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(4)
    for number in (1, 2, 3, 4):
        trainer.step(number, loss=float(number), evaluated=number in (1, 4))
    path = f"{JOBS}/{job_id}/metrics"
    service.until(lambda: len(service.call("GET", path).json()["steps"]) == 4)
    only = service.call("GET", f"{path}?evaluated_only=true").json()
    assert only["steps"] == [1, 4]
    assert only["validation_loss"] == [1, 4]
    assert len({len(one) for one in only.values() if isinstance(one, list)}) == 1


def test_the_metrics_of_a_very_long_job_are_bounded_and_the_gates_decide_alike(
    service: Service,
) -> None:
    job_id = service.job()
    path = f"{JOBS}/{job_id}/metrics"
    rows = [
        {
            "job_id": job_id,
            "step": step,
            "training_loss": 1 + 2 * 0.9999**step,
            "validation_loss": 1.2 + 2 * 0.9999 ** (step // 50 * 50),
            "learning_rate": 1e-4,
            "epoch": step / 1000,
            "accuracy": 0.5,
            "perplexity": 3.0,
            "evaluated": step % 50 == 0,
        }
        for step in range(1, 60_001)
    ]
    with service.database.write() as connection:
        for first in range(0, len(rows), 5000):
            connection.execute(sa.insert(tables.job_metrics), rows[first : first + 5000])
    answer = service.call("GET", path)
    thinned = answer.json()
    assert (thinned["thinned"], answer.status_code) == (True, 200)
    assert len(answer.content) < 1_000_000
    assert JobMetrics.model_validate(thinned).model_dump(mode="json") == thinned
    names = {"step": "steps", "epoch": "epochs"}
    columns = [name for name in rows[0] if name not in ("job_id", "evaluated")]
    whole = {names.get(name, name): [row[name] for row in rows] for name in columns}
    job = FinishedJob("completed", "ft:m", "m", 60_000, None, None, 900)
    verdicts = [judge_training(job, one, None, TrainingRules()) for one in (whole, thinned)]
    assert verdicts[0] == verdicts[1]
    assert watch_training(DivergenceWatch(), whole, 100) == watch_training(
        DivergenceWatch(), thinned, 100
    )


def test_each_event_tells_the_state_and_an_epoch_is_reported_once(service: Service) -> None:
    job_id = service.job()
    first = service.trainer(0)
    first.start_of(4)
    first.step(1)
    first.step(2, loss=0.5)
    first.epoch(1, loss=0.5)
    service.until(lambda: any(kind == "epoch_completed" for kind, _ in events_of(service, job_id)))
    first.code = -9
    second = service.trainer(1)
    second.start_of(4, resumed_from=1)
    second.step(2, loss=0.5)
    second.epoch(1, loss=0.5)
    second.step(4, loss=0.25)
    second.epoch(2, loss=0.25)
    second.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    events = events_of(service, job_id)
    kinds = ["queued", "started", "epoch_completed", "epoch_completed", "succeeded"]
    assert [kind for kind, _ in events] == kinds
    assert [data["status"] for _, data in events] == ["queued", *["running"] * 3, "completed"]
    epochs = [data for kind, data in events if kind == "epoch_completed"]
    assert [(one["epoch"], one["training_loss"], one["validation_loss"]) for one in epochs] == [
        (1, 0.5, 0.5),
        (2, 0.25, 0.25),
    ]
    assert events[-1][1]["fine_tuned_model"].startswith("ft:")
    assert events[-1][1]["total_steps"] == 4


def test_a_job_that_ends_early_says_why_and_has_done_all_its_steps(service: Service) -> None:
    job_id = service.job(hyperparameters={"early_stopping_patience": 2})
    trainer = service.trainer()
    orders = json.loads((trainer.folder / "spec.json").read_text())
    assert orders["hyperparameters"]["early_stopping_patience"] == 2
    trainer.start_of(9)
    for number, loss in enumerate((3.0, 1.0, 2.0, 1.0), 1):
        trainer.step(number, loss=loss, evaluated=True)
    trainer.end_early(4, best_step=2, patience=2)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    got = service.call("GET", f"{JOBS}/{job_id}").json()
    assert (got["current_step"], got["total_steps"]) == (4, 4)
    assert got["hyperparameters"]["early_stopping_patience"] == 2
    log = [one["message"] for one in service.call("GET", f"{JOBS}/{job_id}/logs").json()["logs"]]
    (why,) = [text for text in log if text.startswith("early_stopping_patience: ")]
    assert "after step 4" in why
    assert "after step 2 in 2 measurements" in why


def test_a_job_that_is_killed_after_its_early_end_says_why_once(service: Service) -> None:
    job_id = service.job(hyperparameters={"early_stopping_patience": 2})
    first = service.trainer()
    first.start_of(9)
    first.step(4, evaluated=True)
    first.end_early(4, best_step=2, patience=2)

    def total_steps() -> int:
        return service.call("GET", f"{JOBS}/{job_id}").json()["total_steps"]

    service.until(lambda: total_steps() == 4)
    first.code = -9
    second = service.trainer(1)
    second.start_of(9, resumed_from=4)
    service.until(lambda: total_steps() == 9)
    second.end_early(4, best_step=2, patience=2)
    second.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    assert total_steps() == 4
    log = [one["message"] for one in service.call("GET", f"{JOBS}/{job_id}/logs").json()["logs"]]
    assert sum(text.startswith("early_stopping_patience: ") for text in log) == 1


def test_a_failed_job_says_why_and_so_does_its_event(service: Service) -> None:
    job_id = service.job()
    service.trainer().say({"kind": "failed", "reason": "out_of_memory", "message": "too big"})
    service.trainer().code = 1
    service.until(lambda: service.job_status(job_id) == "failed")
    got = service.call("GET", f"{JOBS}/{job_id}").json()
    assert got["error"] == {
        "code": "fine_tuning_error",
        "reason": "out_of_memory",
        "message": "too big",
    }
    kind, data = events_of(service, job_id)[-1]
    assert (kind, data["reason"], data["status"]) == ("failed", "out_of_memory", "failed")
    assert "completed_at" not in service.call("GET", JOBS).json()["jobs"][0]


def test_a_process_that_hangs_past_the_maximum_runtime_fails_its_job(start: Start) -> None:
    service = start()
    job_id = service.job(compute_config={"max_runtime_hours": 1})
    trainer = service.trainer()
    orders = json.loads((trainer.folder / "spec.json").read_text())
    assert orders["max_runtime_seconds"] == 3600
    trainer.start_of(4)
    service.until(lambda: service.job_status(job_id) == "running")
    service.clock.ahead = timedelta(hours=1, minutes=6)
    service.until(lambda: service.job_status(job_id) == "failed")
    got = service.call("GET", f"{JOBS}/{job_id}").json()
    assert got["error"]["reason"] == "max_runtime_exceeded"
    assert trainer.code is not None


def test_instance_types_are_those_of_this_machine(
    shared: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "none")
    types = shared.call("GET", "/v1/instance-types").json()["instance_types"]
    keys = {"name", "compute_type", "available", "cpus", "memory_gb", "gpus"}
    assert all(set(one) == keys for one in types)
    local, gpu = types
    assert (local["name"], local["available"], local["gpus"]) == ("local", True, 0)
    assert (gpu["name"], gpu["available"]) == ("local-gpu", False)
    assert local["cpus"] >= 1
    assert 0 < local["memory_gb"] < 10_000
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "gpus")
    with_gpu = shared.call("GET", "/v1/instance-types").json()["instance_types"]
    assert [(one["available"], one["gpus"]) for one in with_gpu] == [(True, 1)] * 2


def test_times_are_whole_seconds_in_records_and_milliseconds_in_logs(shared: Service) -> None:
    job_id = shared.job()
    record = shared.call("GET", f"{JOBS}/{job_id}").json()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["created_at"])
    entry = shared.call("GET", f"{JOBS}/{job_id}/logs").json()["logs"][0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["timestamp"])
