"""A job shows its place in the queue, its speed and its expected end, and tenants take turns."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.support.service.in_process import Service

pytestmark = pytest.mark.both_databases
Start = Callable[..., Service]
JOBS = "/v1/fine-tuning/jobs"
REFERENCE = {
    "id", "base_model", "dataset_id", "validation_dataset_id", "fine_tuning_method", "model_name",
    "status", "created_at", "updated_at", "validation_frequency", "hyperparameters",
    "compute_config", "tags", "fine_tuned_model", "started_at", "current_epoch", "total_epochs",
    "current_step", "total_steps", "training_loss", "validation_loss",
}  # fmt: skip


def shown(service: Service, job_id: str, client: str = "alice") -> dict[str, Any]:
    return service.call("GET", f"{JOBS}/{job_id}", client).json()


def pace(trainer: Any, seconds_per_step: float, tokens_per_second: float = 1000.0) -> None:
    trainer.say(
        {
            "kind": "pace",
            "tokens_per_second": tokens_per_second,
            "seconds_per_step": seconds_per_step,
        }
    )


def test_a_job_names_the_gpus_that_it_trains_on(service: Service) -> None:
    job_id = service.job()
    trainer = service.trainer_of(job_id)
    assert shown(service, job_id)["devices"] is None
    trainer.say({"kind": "devices", "devices": ["GPU 1 (Tesla T4, 3f2a)"]})
    service.until(lambda: shown(service, job_id)["devices"] == ["GPU 1 (Tesla T4, 3f2a)"])


def test_tenants_take_turns_and_each_job_shows_its_place(start: Start) -> None:
    service = start(concurrent_jobs=1)
    first = service.job()
    service.until(lambda: service.job_status(first) == "running")
    alices = [service.job() for _ in range(2)]
    bobs = [service.job("bob") for _ in range(2)]
    clients = {**dict.fromkeys(alices, "alice"), **dict.fromkeys(bobs, "bob")}
    places = {job: shown(service, job, client)["queue_position"] for job, client in clients.items()}
    assert places == {bobs[0]: 1, alices[0]: 2, bobs[1]: 3, alices[1]: 4}
    assert shown(service, first)["queue_position"] is None
    order: list[str] = []
    for number in range(5):
        trainer = service.trainer(number)
        order.append(trainer.folder.parent.name)
        trainer.start_of(1)
        trainer.complete()
    assert order == [first, bobs[0], alices[0], bobs[1], alices[1]]


def test_no_more_jobs_run_at_once_than_the_service_allows(start: Start) -> None:
    service = start(concurrent_jobs=2)
    jobs = [service.job(), service.job("bob"), service.job()]
    service.trainer(1)
    service.until(lambda: service.job_status(jobs[1], "bob") == "running")
    assert [service.job_status(jobs[0]), service.job_status(jobs[2])] == ["running", "queued"]
    assert len(service.engines.trainers) == 2
    service.trainer(0).start_of(1)
    service.trainer(0).complete()
    service.until(lambda: service.job_status(jobs[2]) == "running")


def test_the_end_is_reported_by_the_measured_time_of_a_step(start: Start) -> None:
    service = start()
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(101)
    trainer.step(1)
    service.until(lambda: shown(service, job_id)["current_step"] == 1)
    before = shown(service, job_id)
    assert (before["tokens_per_second"], before["estimated_completion_at"]) == (None, None)
    pace(trainer, seconds_per_step=36.0, tokens_per_second=1234.5)
    service.until(lambda: shown(service, job_id)["tokens_per_second"] == 1234.5)
    got = shown(service, job_id)
    left = datetime.fromisoformat(got["estimated_completion_at"]) - datetime.fromisoformat(
        got["updated_at"]
    )
    assert abs(left - timedelta(hours=1)) <= timedelta(seconds=1)
    # A step that takes longer than any before postpones the expected end, which is never in the past.
    service.clock.ahead = timedelta(hours=2)
    asked_at = service.clock().replace(microsecond=0)
    late = datetime.fromisoformat(shown(service, job_id)["estimated_completion_at"])
    assert late >= asked_at
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    done = shown(service, job_id)
    assert (done["tokens_per_second"], done["estimated_completion_at"]) == (1234.5, None)


def test_an_end_beyond_all_calendars_is_still_a_date(service: Service) -> None:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(10**12)
    trainer.step(1)
    pace(trainer, seconds_per_step=1e9)
    service.until(lambda: shown(service, job_id)["estimated_completion_at"] is not None)


@pytest.mark.parametrize("profile", ["full", "simplified"])
def test_a_strict_client_gets_exactly_the_references_fields(service: Service, profile: str) -> None:
    job_id = service.job()
    headers = {"X-API-Profile": profile}
    answer = service.call("GET", f"{JOBS}/{job_id}", headers=headers)
    assert set(answer.json()) == REFERENCE
    assert set(shown(service, job_id)) == REFERENCE | {
        "ends_learnt", "devices", "security_settings", "queue_position", "tokens_per_second",
        "estimated_completion_at",
    }  # fmt: skip
