"""Jobs on two devices run as real processes, none of which outlives its job or the service."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.processes import Serve, ended_job, rows_file, start_job
from tests.support.waiting import children, is_alive, until
from tuneship.client import Client

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started = Serve(tmp_path / "data", training_devices="2")
    yield started
    started.stop()


def filters_of(process: int) -> int:
    """The number of system call filters of a process: the one that isolates a worker, and any of the container's."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("Seccomp_filters:")[2].split()[0])


def both_processes(serve: Serve) -> list[int]:
    """The processes of the job's only attempt; empty before both are there."""
    trainers = serve.workers("tuneship.training")
    both = [*trainers, *(rank for trainer in trainers for rank in children(trainer))]
    return both if len(both) == 2 else []


def processes_of_job(serve: Serve, client: Client, job_id: str, steps: int = 0) -> list[int]:
    """Both processes of a job that has done more than so many steps, some perhaps in an earlier attempt."""
    until(lambda: both_processes(serve))
    until(lambda: client.jobs.get(job_id).current_step > steps)
    both = until(lambda: both_processes(serve))
    until(lambda: {filters_of(one) for one in both} == {filters_of(serve.process.pid) + 1})
    return both


@pytest.mark.soak
def test_a_job_whose_second_process_is_killed_goes_on_and_its_service_ends_both(
    serve: Serve, tmp_path: Path
) -> None:
    client = serve.client()
    job_id = start_job(client, rows_file(tmp_path / "rows.jsonl", 72), epochs=1000)
    first = processes_of_job(serve, client, job_id, steps=16)
    os.kill(first[1], signal.SIGKILL)
    until(lambda: not any(map(is_alive, first)))
    until(
        lambda: any(
            f"ended with {128 + signal.SIGKILL}; it resumes" in entry.message
            for entry in client.jobs.logs(job_id).logs
        )
    )
    second = processes_of_job(serve, client, job_id, client.jobs.get(job_id).current_step)

    serve.kill()
    until(lambda: not any(map(is_alive, second)))
    serve.start()
    client = serve.client()
    third = processes_of_job(serve, client, job_id, client.jobs.get(job_id).current_step)
    client.jobs.cancel(job_id)
    assert ended_job(client, job_id).status == "cancelled"
    until(lambda: not any(map(is_alive, third)))
    until(lambda: not (serve.data_dir / "work" / job_id).exists())


@pytest.mark.soak
def test_a_job_on_two_devices_makes_a_model(serve: Serve, tmp_path: Path) -> None:
    client = serve.client()
    job = ended_job(client, start_job(client, rows_file(tmp_path / "rows.jsonl", 72)))
    assert job.status == "completed", job.error
    messages = [entry.message for entry in client.jobs.logs(job.id).logs]
    assert "2 devices train together, each on its share of every batch" in messages
    assert client.jobs.metrics(job.id).steps == list(range(1, job.total_steps + 1))
    until(lambda: not serve.workers("tuneship.training"))
