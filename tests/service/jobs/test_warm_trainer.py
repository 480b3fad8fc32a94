"""A training process waits for its job with its libraries already loaded."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.in_process import Service
from tests.support.processes import Serve, ended_job, rows_file, start_job
from tests.support.waiting import is_alive, until
from tuneship.service.jobs.warm_trainer import AFTER_A_DEATH, SETTLE

Start = Callable[..., Service]


def idle(service: Service, number: int) -> None:
    """Check that the trainer with this number was started to wait, and knows only where its order will come."""
    service.clock.ahead += SETTLE
    service.until(lambda: len(service.engines.trainers) > number)
    waits, descriptor = service.engines.trainers[number].spec.arguments
    assert waits == "--wait"
    assert descriptor.isdigit()


def test_a_job_gets_the_process_that_waits_and_another_waits_then(start: Start) -> None:
    service = start(warm_trainer=True, concurrent_jobs=2)
    idle(service, 0)
    job_id = service.job()
    service.until(lambda: service.job_status(job_id) == "running")
    trainer = service.engines.trainers[0]
    service.until(lambda: trainer.folder.parent.name == job_id)
    trainer.start_of(2)
    trainer.step(1)
    service.until(
        lambda: service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["current_step"] == 1
    )
    idle(service, 1)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    assert len(service.engines.trainers) == 2


def test_a_job_does_not_depend_on_one_that_died_while_it_waited(start: Start) -> None:
    service = start(warm_trainer=True)
    idle(service, 0)
    service.engines.trainers[0].code = -9
    job_id = service.job()
    cold = service.trainer(1)
    assert cold.folder.parent.name == job_id
    cold.start_of(1)
    cold.step(1)
    cold.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    service.clock.ahead += AFTER_A_DEATH
    idle(service, 2)


def test_a_service_that_shall_keep_none_keeps_none(start: Start) -> None:
    service = start(warm_trainer=False)
    service.clock.ahead += timedelta(hours=1)
    job_id = service.job()
    assert service.trainer().folder.parent.name == job_id
    assert [one.spec.arguments[0] for one in service.engines.trainers] != ["--wait"]


@pytest.mark.slow
@pytest.mark.long
def test_a_waiting_process_trains_one_job_and_dies_with_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_WARM_TRAINER", "true")
    serve = Serve(tmp_path / "data")
    try:
        until(lambda: len(serve.workers("--wait")) == 1)
        (waiting,) = serve.workers("--wait")
        client = serve.client()
        job_id = start_job(client, rows_file(tmp_path / "rows.jsonl", 64))
        until(lambda: serve.workers("--wait") not in ([], [waiting]))
        assert ended_job(client, job_id).status == "completed"
        until(lambda: waiting not in serve.workers("--wait"))
        (successor,) = serve.workers("--wait")
        os.kill(serve.process.pid, signal.SIGKILL)
        serve.process.wait()
        until(lambda: not is_alive(successor))
    finally:
        serve.stop()
