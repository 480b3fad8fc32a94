"""A job ends when its process has reported that its model is complete (kills: `system/test_crash_points.py`)."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tuneship.service.context.timing import ServiceTiming
from tuneship.store.database import tables

pytestmark = pytest.mark.both_databases(postgres="soak")
JOBS = "/v1/fine-tuning/jobs"


def models_of(service: Service) -> list[str]:
    with service.database.read() as connection:
        return list(connection.scalars(sa.select(tables.models.c.job_id)))


def successes_of(service: Service) -> list[str]:
    is_success = tables.events.c.type == "fine_tuning.job.succeeded"
    with service.database.read() as connection:
        return list(connection.scalars(sa.select(tables.events.c.resource_id).where(is_success)))


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
    # This takes several rounds, in which a second attempt of the first job would start.
    other = service.job()
    service.trainer_of(other).start_of(1)
    service.trainer_of(other).complete()
    service.until(lambda: service.job_status(other) == "completed")
    assert len(service.engines.trainers) == 2
    assert sorted(models_of(service)) == sorted(successes_of(service)) == sorted([job_id, other])


def test_a_cancelled_job_waits_for_its_process_even_when_that_has_completed(
    start: Callable[..., Service],
) -> None:
    service = start(timing=ServiceTiming(cancel_patience=timedelta(days=1)))
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
