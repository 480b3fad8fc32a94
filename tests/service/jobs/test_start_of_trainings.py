"""The libraries of trainings are loaded before the first job, in a process from which all workers are forked."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.service.in_process import Service
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import is_alive, until
from tuneship.contract.generation import Generate
from tuneship.service.jobs.local_launcher import SETTLE

Start = Callable[..., Service]

PROMPT = Generate(prompt="What is case 7?", max_tokens=4, temperature=0)


def test_libraries_are_loaded_once_some_time_after_the_start(start: Start) -> None:
    service = start(preload_training=True)
    assert service.engines.preloaded == []
    service.clock.ahead += SETTLE
    service.until(lambda: service.engines.preloaded == ["tuneship.training"])
    job_id = service.job()
    service.trainer().complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    assert service.engines.preloaded == ["tuneship.training"]


def test_a_service_that_is_to_load_none_before_the_first_job_loads_none(start: Start) -> None:
    service = start(preload_training=False)
    service.clock.ahead += timedelta(hours=1)
    job_id = service.job()
    assert service.trainer().folder.parent.name == job_id
    assert service.engines.preloaded == []


@pytest.mark.slow
def test_workers_outlive_the_process_that_they_are_forked_from(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data", preload_training="true")
    try:
        client = serve.client()
        (forks,) = until(lambda: serve.workers("tuneship.processes.fork_server"))
        rows = rows_file(tmp_path / "rows.jsonl", 64)
        first = ended_job(client, start_job(client, rows))
        assert first.fine_tuned_model is not None, first.error
        deployment = running_deployment(client, "d", first.fine_tuned_model)
        (replica,) = serve.workers("tuneship.serving")
        answer = client.deployments.generate(deployment, PROMPT).completion
        os.kill(forks, signal.SIGKILL)
        until(lambda: not is_alive(forks))
        assert client.deployments.generate(deployment, PROMPT).completion == answer
        second = ended_job(client, start_job(client, rows))
        assert second.status == "completed", second.error
        assert serve.workers("tuneship.serving") == [replica]
        (successor,) = serve.workers("tuneship.processes.fork_server")
        assert successor != forks
        serve.kill()
        until(lambda: not is_alive(successor))
        until(lambda: not is_alive(replica))
    finally:
        serve.stop()
