"""Processes that stood still (the machine slept, a container was paused) continue as if nothing had happened."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.generation import Generate

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
ROUNDS = 3
LONGEST_S = 1.5


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    made = Serve(tmp_path / "data")
    yield made
    made.stop()


def stand_still(processes: list[int], seconds: float) -> None:
    with ExitStack() as held:
        for process in processes:
            os.kill(process, signal.SIGSTOP)
            held.callback(os.kill, process, signal.SIGCONT)
        time.sleep(seconds)


class Asking(Thread):
    """A thread that generates all the time; a failure ends it and is kept."""

    def __init__(self, client: Client, deployment: str) -> None:
        super().__init__()
        self.client, self.deployment = client, deployment
        self.over = Event()
        self.answers = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self.client.deployments.generate(
                    self.deployment, Generate(prompt="What is case 1 red?", max_tokens=8)
                )
            except Exception as error:  # noqa: BLE001 - the test reports any error
                self.failure = error
                return
            self.answers += 1

    def go_on(self) -> None:
        """Wait for two more answers; the second one belongs to a request sent after this call."""
        before = self.answers
        until(lambda: self.failure or self.answers > before + 1)
        assert self.failure is None


def test_processes_that_stood_still_go_on(serve: Serve, tmp_path: Path) -> None:
    """Stop processes alone and all at once: the job needs one attempt, the replica stays, and every answer comes."""
    client = serve.client()
    deployment = running_deployment(client, "d", "tuneship-tiny")
    job_id = start_job(client, rows_file(tmp_path / "rows.jsonl", 64), epochs=1000)
    until(lambda: client.jobs.get(job_id).current_step > 0)
    replicas = serve.workers("tuneship.serving")
    everything = [serve.process.pid, *replicas, *serve.workers("tuneship.training")]
    dice = random.Random(11)  # noqa: S311 - a fault, not a secret

    asking = Asking(serve.client(), deployment)
    asking.start()
    try:
        for _ in range(ROUNDS):
            for some in (*([one] for one in everything), everything):
                stand_still(some, dice.uniform(0.3, LONGEST_S))
                asking.go_on()
                done = client.jobs.get(job_id).current_step
                until(lambda done=done: client.jobs.get(job_id).current_step > done)
    finally:
        asking.over.set()
        asking.join()

    messages = [entry.message for entry in client.jobs.logs(job_id).logs]
    assert not [one for one in messages if "resumes" in one]
    assert serve.workers("tuneship.serving") == replicas
    assert client.deployments.get(deployment).status == "running"
    client.jobs.cancel(job_id)
    assert ended_job(client, job_id).status == "cancelled"
