"""A service whose replicas are run by agents, as processes of this machine, answers as one with its own processes.

The agents, their replicas and the service are killed while clients ask.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.faults.repeating import repeating
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    served,
    start_job,
)
from tests.support.waiting import children, is_alive, until
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.embeddings import Embed
from tuneship.contract.errors import ApiError
from tuneship.contract.generation import Generate, Generation

pytestmark = [pytest.mark.slow, pytest.mark.long]
AGENT = "tuneship.agents.agent"
PROMPT = Generate(prompt="What is case 7?", max_tokens=8, temperature=0)
TEXT = Embed(input=["What is case 7?"])
CLIENTS = 32
KILLS = 60


def agents_of(service: Serve) -> list[int]:
    return [pid for pid in service.workers(AGENT) if children(pid)]


def replicated(client: Client, model: str, replicas: int) -> str:
    """Deploy a model on several replicas, and wait until all of them serve it."""
    made = client.deployments.create(
        DeploymentCreate(
            model_name=model,
            deployment_name="several",
            min_replicas=replicas,
            max_replicas=replicas,
        )
    ).id
    until(lambda: client.deployments.get(made).current_replicas == replicas)
    return made


def test_they_answer_as_the_services_own_processes_do(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with served(data) as service:
        client = service.client()
        model = ended_job(
            client, start_job(client, rows_file(tmp_path / "rows", 64))
        ).fine_tuned_model
        assert model is not None
        deployment = running_deployment(client, "tuned", model, isolated=True)
        text = client.deployments.generate(deployment, PROMPT).completion
        vector = client.deployments.embed(deployment, TEXT).embeddings[0]
        assert service.workers(AGENT) == []
    with served(data, agents="local") as service:
        client = service.client()
        until(lambda: client.deployments.get(deployment).health == "healthy")
        assert client.deployments.generate(deployment, PROMPT).completion == text
        assert client.deployments.embed(deployment, TEXT).embeddings[0] == vector
        (agent,) = agents_of(service)
        (replica,) = children(agent)
        assert service.workers("tuneship.serving") == []
        service.process.kill()
        until(lambda: not is_alive(agent) and not is_alive(replica))


def p99(spans: list[float]) -> float:
    return sorted(spans)[len(spans) * 99 // 100]


class Askers:
    """Clients that ask a deployment all the time; every other one reads its answer as a stream."""

    def __init__(self, service: Serve, deployment: str) -> None:
        self._service, self._deployment = service, deployment
        self.answers = Counter[str]()
        # When each request for a whole answer was sent, and how many seconds it took.
        self.spans = list[tuple[float, float]]()
        # Codes of the errors with which streams have ended.
        self.broken = Counter[str]()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let them ask meanwhile. Raises what any of them was answered that it did not expect."""
        kinds = (self._ask, self._stream)
        asking = [partial(kinds[number % 2], self._service.client()) for number in range(CLIENTS)]
        with repeating(*asking):
            yield

    def more(self) -> None:
        """Wait until they have got more answers."""
        before = self.answers.total()
        until(lambda: self.answers.total() > before + 2 * CLIENTS)

    def _ask(self, client: Client) -> None:
        sent = time.monotonic()
        self.answers[client.deployments.generate(self._deployment, PROMPT).completion] += 1
        self.spans.append((sent, time.monotonic() - sent))

    def _stream(self, client: Client) -> None:
        try:
            *_, last = client.deployments.stream(self._deployment, PROMPT)
        except ApiError as error:
            self.broken[error.code] += 1
        else:
            assert isinstance(last, Generation)
            self.answers[last.completion] += 1


@pytest.mark.soak
def test_no_whole_answer_is_lost_when_agents_and_replicas_are_killed(
    tmp_path: Path,
) -> None:
    """A stream that has begun may end with the error that the contract names for this."""
    unlimited = {"generate_requests_per_minute": "0"}
    with served(tmp_path / "data", agents="local", **unlimited) as service:
        client = service.client()
        deployment = replicated(client, "tuneship-tiny", 2)
        expected = client.deployments.generate(deployment, PROMPT).completion
        askers = Askers(service, deployment)
        with askers.at_work():
            until(lambda: len(askers.spans) > 4 * CLIENTS)
            first = time.monotonic()
            for number in range(KILLS):
                agents = until(lambda: (found := agents_of(service))[1:] and found)
                victim = agents[0] if number % 2 else children(agents[0])[0]
                os.kill(victim, signal.SIGKILL)
                until(lambda victim=victim: not is_alive(victim))
                askers.more()
                until(
                    lambda: (
                        client.deployments.get(deployment).current_replicas == 2
                        and len(agents_of(service)) == 2
                    )
                )
        calm = [span for sent, span in askers.spans if sent + span < first]
        later = [span for sent, span in askers.spans if sent > first]
        print(  # noqa: T201 - the figures of the run
            f"{KILLS} kills, p99 {p99(later):.2f} s, before the first one {p99(calm):.2f} s, "
            f"{askers.answers.total()} answers, streams that broke off: {dict(askers.broken)}"
        )
        assert set(askers.answers) == {expected}
        assert set(askers.broken) <= {"internal_error"}
