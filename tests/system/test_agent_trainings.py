"""Trainings that agents run, as processes of this machine: killed, stopped and cancelled, their results stay the same.

What is computed twice must be equal to the last bit, so each result is compared with one of a training without a fault.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.objects.opened import opened
from tests.support.repeats import repeats
from tests.support.service.processes import Serve, ended_job, rows_file, served, start_job
from tests.support.waiting import children, is_alive, until
from tuneship.contract.jobs import ENDED, Job
from tuneship.store.database import tables
from tuneship.store.database.database import Database, sqlite_url
from tuneship.training.spec import PROGRESS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.long]
AGENT = "tuneship.agents.agent"
EPOCHS = 3
# The time that a whole job takes on an agent, more or less.
UNDISTURBED_S = 12.0


def results(service: Serve, job: Job) -> dict[str, Any]:
    """The curve and the opened files of the adapter."""
    assert job.status == "completed", job.error
    metrics = service.client().jobs.metrics(job.id).model_dump(exclude={"job_id", "created_at"})
    database = Database(sqlite_url(service.data_dir / "tuneship.sqlite"))
    with database.read() as connection:
        files = opened(connection, service.data_dir, tables.models)
    database.close()
    return {**metrics, "adapter": {name.rpartition("/")[2]: one for name, one in files.items()}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows_file(tmp_path_factory.mktemp("rows") / "rows", 64)


@pytest.fixture(scope="module")
def expected(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a process of the service, without a fault."""
    with served(tmp_path_factory.mktemp("own") / "data") as service:
        client = service.client()
        return results(service, ended_job(client, start_job(client, rows, epochs=EPOCHS)))


class AgentJob:
    """A job that an agent trains."""

    def __init__(self, service: Serve, rows: Path) -> None:
        self.service, self.client = service, service.client()
        self.id = start_job(self.client, rows, epochs=EPOCHS, isolated=True)

    def at_work(self) -> tuple[int, int]:
        """Wait until a checkpoint of the first attempt has arrived; return the agent and its process."""
        until(self.checkpoints)
        (agent,) = [pid for pid in self.service.workers(AGENT) if children(pid)]
        (trainer,) = children(agent)
        return agent, trainer

    def checkpoints(self) -> list[Path]:
        """The checkpoints that have arrived at the service."""
        return [*(self.service.data_dir / "work" / self.id / "checkpoints").glob("step-*")]

    def kill_agent(self) -> None:
        """Kill the agent, if it still runs, and wait until its process is gone, too."""
        for agent in self.service.workers(AGENT):
            trainers = children(agent)
            os.kill(agent, signal.SIGKILL)
            until(lambda trainers=trainers: not any(is_alive(pid) for pid in trainers))

    def has_reported(self, kind: str, attempt: int = 1) -> bool:
        """Whether a line of this kind has arrived from an attempt."""
        file = self.service.data_dir / "work" / self.id / f"attempt-{attempt}" / PROGRESS_FILE
        try:
            return f'"kind": "{kind}"' in file.read_text()
        except FileNotFoundError:
            return False

    def has_ended(self) -> bool:
        return self.client.jobs.get(self.id).status in ENDED

    def computes_again_or_has_ended(self) -> bool:
        return self.has_reported("step", attempt=2) or self.has_ended()

    def started(self, attempt: int) -> None:
        """Wait until an attempt has begun to compute."""
        until(lambda: self.has_reported("started", attempt))

    def resumed_steps(self) -> list[str]:
        logs = self.client.jobs.logs(self.id).logs
        return [entry.message for entry in logs if ", from step " in entry.message]


@pytest.fixture
def job(rows: Path, tmp_path: Path) -> Iterator[AgentJob]:
    with served(tmp_path / "data", agents="local") as service:
        yield AgentJob(service, rows)


# What has happened to a job when its agent is killed, in this order.
MOMENTS: dict[str, Callable[[AgentJob], object]] = {
    "claimed": lambda job: job.service.workers(AGENT),
    "at the node": lambda job: any(children(pid) for pid in job.service.workers(AGENT)),
    "begun": lambda job: job.has_reported("started"),
    "in an epoch": lambda job: job.has_reported("step"),
    "checkpoint": lambda job: job.checkpoints(),
    "completed": lambda job: job.has_reported("completed"),
}
PER_COMMIT = {"checkpoint"}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[] if moment in PER_COMMIT else pytest.mark.soak)
        for moment in MOMENTS
    ],
)
def test_a_training_goes_on_when_its_agent_is_killed(
    job: AgentJob, expected: dict[str, Any], moment: str
) -> None:
    until(lambda: MOMENTS[moment](job) or job.has_ended())
    assert job.service.workers("tuneship.training") == []
    job.kill_agent()
    killed = time.monotonic()
    until(job.computes_again_or_has_ended)
    print(f"killed at {moment}: goes on after {time.monotonic() - killed:.1f} s")  # noqa: T201
    assert results(job.service, ended_job(job.client, job.id)) == expected
    if moment == "checkpoint":
        assert job.resumed_steps()
    until(lambda: job.service.workers(AGENT) == [])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(54))
def test_a_training_goes_on_when_its_agent_is_killed_at_any_moment(
    job: AgentJob, expected: dict[str, Any], seed: int
) -> None:
    until(lambda: job.service.workers(AGENT))
    time.sleep(random.Random(seed).uniform(0.0, UNDISTURBED_S))  # noqa: S311 - a fault, not a secret
    job.kill_agent()
    assert results(job.service, ended_job(job.client, job.id)) == expected


@pytest.mark.parametrize("turn", repeats(each_commit=1, soak=20))
def test_an_agent_and_a_process_that_stand_still_are_gone_when_the_next_attempt_computes(
    job: AgentJob, expected: dict[str, Any], turn: int
) -> None:
    agent, trainer = job.at_work()
    for pid in (agent, trainer):
        os.kill(pid, signal.SIGSTOP)
    job.started(2)
    assert not is_alive(trainer)
    assert not is_alive(agent)
    assert results(job.service, ended_job(job.client, job.id)) == expected
    assert job.resumed_steps()


@pytest.mark.parametrize("turn", repeats(each_commit=0, soak=20))
def test_a_process_ends_by_itself_when_its_agent_stands_still(
    job: AgentJob, expected: dict[str, Any], turn: int
) -> None:
    agent, trainer = job.at_work()
    os.kill(agent, signal.SIGSTOP)
    job.started(2)
    assert not is_alive(trainer)
    assert results(job.service, ended_job(job.client, job.id)) == expected


@pytest.mark.soak
def test_a_training_ends_when_its_service_stands_still_and_goes_on_with_it(
    job: AgentJob, expected: dict[str, Any]
) -> None:
    agent, trainer = job.at_work()
    os.kill(job.service.process.pid, signal.SIGSTOP)
    until(lambda: not is_alive(trainer) and not is_alive(agent))
    os.kill(job.service.process.pid, signal.SIGCONT)
    assert results(job.service, ended_job(job.client, job.id)) == expected


def test_a_cancelled_training_is_gone(job: AgentJob) -> None:
    agent, trainer = job.at_work()
    job.client.jobs.cancel(job.id)
    assert ended_job(job.client, job.id).status == "cancelled"
    until(lambda: not is_alive(trainer) and not is_alive(agent))
    until(lambda: not (job.service.data_dir / "work" / job.id).exists())


def test_a_service_that_is_ended_ends_its_agents_and_goes_on_after_a_restart(
    job: AgentJob, expected: dict[str, Any]
) -> None:
    agent, trainer = job.at_work()
    job.service.stop()
    assert not is_alive(trainer)
    assert not is_alive(agent)
    job.service.start()
    job.client = job.service.client()
    assert results(job.service, ended_job(job.client, job.id)) == expected
    assert job.resumed_steps()
