"""A job ends when its process has said that its model is complete: whatever the process does then, and over kills."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.service.in_process import Service
from tuneship.service import serve
from tuneship.store import tables

pytestmark = pytest.mark.both_databases
JOBS = "/v1/fine-tuning/jobs"


def models_of(service: Service) -> list[str]:
    with service.database.read() as connection:
        return list(connection.scalars(sa.select(tables.models.c.job_id)))


def successes_of(service: Service) -> list[str]:
    told = tables.events.c.type == "fine_tuning.job.succeeded"
    with service.database.read() as connection:
        return list(connection.scalars(sa.select(tables.events.c.resource_id).where(told)))


def test_a_model_is_there_before_its_process_has_left_and_the_process_is_ended(
    service: Service,
) -> None:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(2)
    trainer.complete(end=False)
    service.until(lambda: service.job_status(job_id) == "completed")
    assert models_of(service) == [job_id]
    service.until(lambda: trainer.code is not None)
    service.until(lambda: not (service.settings.data_dir / "work" / job_id).exists())


@pytest.mark.parametrize("exit_code", [1, -9, -11])
def test_the_exit_code_of_a_process_that_has_completed_decides_nothing(
    service: Service, exit_code: int
) -> None:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(2)
    trainer.complete(end=False)
    trainer.code = exit_code
    service.until(lambda: service.job_status(job_id) == "completed")
    other = service.job()  # several ticks, in which a second attempt of the first would start
    service.trainer_of(other).start_of(1)
    service.trainer_of(other).complete()
    service.until(lambda: service.job_status(other) == "completed")
    assert len(service.engines.trainers) == 2
    assert sorted(models_of(service)) == sorted(successes_of(service)) == sorted([job_id, other])


def test_a_cancelled_job_waits_for_its_process_even_when_that_has_completed(
    service: Service,
) -> None:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(2)
    service.until(lambda: service.job_status(job_id) == "running")
    service.call("POST", f"{JOBS}/{job_id}/cancel")
    service.until((trainer.folder / "cancel").exists)
    trainer.step(1)
    trainer.complete(end=False)
    service.until(lambda: _step_of(service, job_id) == 1)
    assert service.job_status(job_id) == "cancelling"
    trainer.code = 0
    service.until(lambda: service.job_status(job_id) == "cancelled")
    assert models_of(service) == []


def _step_of(service: Service, job_id: str) -> int:
    return service.call("GET", f"{JOBS}/{job_id}").json()["current_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "attempts"),
    [("before the row", 1), ("before the commit", 1), ("after the commit", 0)],
)
def test_a_service_that_is_killed_as_it_registers_a_model_has_one_in_the_end(
    crash: Callable[[str, str], tuple[Path, dict[str, Any]]], point: str, attempts: int
) -> None:
    folder, settings = crash("complete_job", point)
    with Service(folder, **settings) as service:
        serve._recover(service.parts)
        with service.database.read() as connection:
            job_id = connection.scalars(sa.select(tables.jobs.c.id)).one()
        if attempts:
            trainer = service.trainer_of(job_id)
            trainer.start_of(2, resumed_from=2)
            trainer.complete()
        service.until(lambda: service.job_status(job_id) == "completed")
        files = {one.name for one in (folder / "blobs" / "models" / job_id).iterdir()}
        assert "adapter_model.safetensors" in files
        assert models_of(service) == successes_of(service) == [job_id]
        assert len(service.engines.trainers) == attempts
        service.until(lambda: not (folder / "work" / job_id).exists())
