"""The service with its real workers trains, serves and stops, and continues after kills."""

import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.service.processes import (
    ROOT,
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
    trainer_at_work,
)
from tests.support.waiting import is_alive, until
from tuneship.client import ApiError, BadResponse, Client, ServiceUnreachable
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.embeddings import Embed
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import JobCreate
from tuneship.store.database.database import IN_USE

pytestmark = [pytest.mark.slow, pytest.mark.long]
# Number of epochs; leaves seconds of work at the kill, even if the test itself is slow to kill.
EPOCHS = 10
PROMPT = Generate(prompt="What is case 7?", max_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("serve") / "data", "--allow-fault-injection", preload=True)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def client(serve: Serve) -> Client:
    return serve.client()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows_file(tmp_path_factory.mktemp("rows") / "rows.jsonl", 72)


@pytest.fixture(scope="module")
def model(client: Client, rows: Path) -> str:
    job = ended_job(client, start_job(client, rows))
    assert job.status == "completed", job.error
    assert job.fine_tuned_model is not None
    return job.fine_tuned_model


def test_a_job_trains_to_a_model_with_whole_metrics(client: Client, model: str) -> None:
    job_id = "ft_" + model.rpartition(":")[2]
    job, metrics = client.jobs.get(job_id), client.jobs.metrics(job_id)
    assert job.completed_at is not None
    assert (job.current_step, job.current_epoch) == (job.total_steps, job.total_epochs)
    assert metrics.steps == list(range(1, job.total_steps + 1))
    arrays = metrics.model_dump(exclude={"job_id", "created_at"})
    assert {len(values) for values in arrays.values()} == {job.total_steps}
    assert all(value is not None for values in arrays.values() for value in values)
    first, last = metrics.validation_loss[0], metrics.validation_loss[-1]
    assert first is not None
    assert last is not None
    assert last < first
    messages = [entry.message for entry in client.jobs.logs(job_id).logs]
    assert messages[0] == "job queued"
    assert messages[-1].startswith("completed")


def test_a_tuned_model_is_deployed_serves_and_leaves(client: Client, model: str) -> None:
    deployment = running_deployment(client, "leaves", model)
    answer = client.deployments.generate(deployment, PROMPT)
    assert answer.deployment_id == deployment
    assert answer.usage.completion_tokens <= 4
    vectors = client.deployments.embed(deployment, Embed(input=["a case", [9, 8]])).embeddings
    assert [len(vector) for vector in vectors] == [128, 128]
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1, 1], abs=1e-4)
    client.deployments.delete(deployment)
    until(lambda: client.deployments.get(deployment).status == "deleted")
    with pytest.raises(ApiError) as refused:
        client.deployments.generate(deployment, PROMPT)
    assert refused.value.status == 409


def test_a_cancelled_job_leaves_no_process(serve: Serve, client: Client, rows: Path) -> None:
    job_id = start_job(client, rows, epochs=1000)
    until(lambda: client.jobs.get(job_id).current_step > 0)
    assert serve.workers("tuneship.training")
    client.jobs.cancel(job_id)
    until(lambda: client.jobs.get(job_id).status == "cancelled")
    until(lambda: serve.workers("tuneship.training") == [])
    until(lambda: not (serve.data_dir / "work" / job_id).exists())
    with pytest.raises(ApiError) as refused:
        client.jobs.cancel(job_id)
    assert refused.value.status == 409


@pytest.mark.essential
def test_a_killed_trainer_resumes_and_completes(serve: Serve, client: Client, rows: Path) -> None:
    job_id = start_job(client, rows, epochs=EPOCHS)
    os.kill(trainer_at_work(serve, job_id, steps=16), signal.SIGKILL)
    job, metrics = ended_job(client, job_id), client.jobs.metrics(job_id)
    assert job.status == "completed"
    assert metrics.steps == list(range(1, job.total_steps + 1))
    messages = [entry.message for entry in client.jobs.logs(job_id).logs]
    assert any("resumes from its checkpoint" in message for message in messages)


@pytest.mark.essential
def test_a_killed_replica_costs_no_request_and_comes_back(serve: Serve, client: Client) -> None:
    deployment = running_deployment(client, "killed", "tuneship-tiny")
    long = Generate(prompt="case", max_tokens=256, temperature=2.0)
    once = client.with_options(tries=1)

    def ask(_: int) -> str:
        return once.deployments.generate(deployment, long).id

    (replica,) = serve.workers("tuneship.serving")
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, number) for number in range(60)]
        answers[0].result()  # the other seven threads are asking now
        os.kill(replica, signal.SIGKILL)
        assert len({answer.result() for answer in answers}) == 60
    summary = client.deployments.metrics(deployment).summary.error_rate
    assert summary is not None
    assert (summary.request_count, summary.error_count) == (60, 0)
    assert serve.workers("tuneship.serving") != [replica]


def test_injected_faults_break_a_deployment_and_are_counted(client: Client) -> None:
    tags = {"fault.error_rate": "1"}
    deployment = running_deployment(client, "faulty", "tuneship-tiny", **tags)
    once = client.with_options(tries=1)
    with pytest.raises(ApiError) as broken:
        once.deployments.generate(deployment, PROMPT)
    assert (broken.value.status, broken.value.code) == (500, "internal_error")
    summary = client.deployments.metrics(deployment).summary.error_rate
    assert summary is not None
    assert summary.average_percentage == 100


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_service_leaves_no_core_file(serve: Serve) -> None:
    limits = Path(f"/proc/{serve.process.pid}/limits").read_text()
    assert re.search(r"Max core file size +0 +0 ", limits)


def test_a_second_service_on_the_folder_is_refused(serve: Serve) -> None:
    command = [sys.executable, "-m", "tuneship.cli.main", "serve", "--port", "0", "--data-dir"]
    second = subprocess.run(
        [*command, str(serve.data_dir)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert second.returncode == IN_USE
    assert re.fullmatch(r"tuneship: another service runs on .*\n", second.stderr)


def test_a_killed_service_finishes_its_job_once_after_it_is_started_again(
    tmp_path: Path, rows: Path
) -> None:
    serve = Serve(tmp_path / "data")
    try:
        client = serve.client()
        job_id = start_job(client, rows, epochs=EPOCHS)
        trainer = trainer_at_work(serve, job_id, steps=16)
        serve.kill()
        until(lambda: not is_alive(trainer))
        serve.start()
        client = serve.client()
        job, metrics = ended_job(client, job_id), client.jobs.metrics(job_id)
        assert job.status == "completed"
        assert metrics.steps == list(range(1, job.total_steps + 1))
        tuned = client.models.list(fine_tuned_only=True).models
        assert [one.id for one in tuned] == [job.fine_tuned_model]
        # A job is completed when its training reports it; the process ends a moment later.
        until(lambda: serve.workers("tuneship.training") == [])
    finally:
        serve.stop()
    with sqlite3.connect(serve.data_dir / "tuneship.sqlite") as database:
        kinds = [row[0] for row in database.execute("select type from events order by position")]
    database.close()
    assert kinds.count("fine_tuning.job.started") == 1
    assert kinds.count("fine_tuning.job.succeeded") == 1


def test_a_create_that_is_repeated_over_kills_makes_one_job(tmp_path: Path, rows: Path) -> None:
    serve = Serve(tmp_path / "data")
    try:
        client = serve.client()
        with rows.open("rb") as opened:
            form = DatasetUpload(name="d", format="instruction")
            dataset = client.datasets.upload(form, opened)
        body = JobCreate(base_model="tuneship-tiny", dataset_id=dataset.id, model_name="m")
        made: set[str] = set()
        for number in range(4):
            with ThreadPoolExecutor(4) as threads:
                asks = [threads.submit(_create, client, body) for _ in range(4)]
                time.sleep(0.004 * number)  # at some moment during the requests
                serve.process.kill()
            serve.kill()  # closes the client, which is no longer used
            made |= {job for ask in asks if (job := ask.result())}
            serve.start()
            client = serve.client()
        made.add(client.with_options(idempotency_key="one").jobs.create(body).id)
        assert len(made) == 1
    finally:
        serve.stop()
    with sqlite3.connect(serve.data_dir / "tuneship.sqlite") as database:
        assert database.execute("select count(*) from jobs").fetchone() == (1,)
    database.close()


def _create(client: Client, body: JobCreate) -> str | None:
    try:
        return client.with_options(idempotency_key="one", tries=1).jobs.create(body).id
    except (ApiError, ServiceUnreachable, BadResponse):
        return None
