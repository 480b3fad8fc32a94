"""A service whose replicas are run by agents, as processes of this machine, answers as one with its own processes.

The agents, their replicas and the service are killed while clients ask.
"""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes import (
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
from tuneship.contract.generation import Generate

pytestmark = pytest.mark.slow
AGENT = "tuneship.runtime.agent"
PROMPT = Generate(prompt="What is case 7?", max_tokens=8, temperature=0)
TEXT = Embed(input=["What is case 7?"])
CLIENTS = 8
KILLS = 2


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


def test_no_whole_answer_is_lost_when_agents_and_replicas_are_killed(tmp_path: Path) -> None:
    with served(tmp_path / "data", agents="local") as service:
        client = service.client()
        deployment = replicated(client, "tuneship-tiny", 2)
        expected = client.deployments.generate(deployment, PROMPT).completion
        is_over = threading.Event()
        answers = Counter[str]()

        def ask() -> None:
            own = service.client()
            while not is_over.is_set():
                answers[own.deployments.generate(deployment, PROMPT).completion] += 1

        with ThreadPoolExecutor(CLIENTS) as threads:
            asking = [threads.submit(ask) for _ in range(CLIENTS)]
            try:
                for number in range(KILLS):
                    agents = until(lambda: (found := agents_of(service))[1:] and found)
                    before = answers.total()
                    victim = agents[0] if number % 2 else children(agents[0])[0]
                    os.kill(victim, signal.SIGKILL)
                    until(lambda victim=victim: not is_alive(victim))
                    until(lambda before=before: answers.total() > before + 2 * CLIENTS)
                    until(
                        lambda: (
                            client.deployments.get(deployment).current_replicas == 2
                            and len(agents_of(service)) == 2
                        )
                    )
            finally:
                is_over.set()
            for one in asking:
                one.result()  # every request was answered
        assert set(answers) == {expected}
