"""Three services of one cluster ask the same agents, which outlive the service that has started them."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cluster_members import PROMPT, Members
from tests.support.postgres_cluster import Cluster
from tests.support.waiting import children, is_alive, until
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate
from tuneship.runtime.certificates import PURPOSE, AgentAuthority
from tuneship.security.master_key import derived_secret, read_or_make_secret

pytestmark = [pytest.mark.slow, pytest.mark.postgres]

BASE = "tuneship-tiny"
CLIENTS = 6


class Agents:
    """The agents of one installation in the operating system, whoever has started them."""

    def __init__(self, key: Path) -> None:
        secret = derived_secret(read_or_make_secret(key), PURPOSE)
        self._trusted = AgentAuthority(secret).trusted.encode()

    def all(self) -> set[int]:
        found = set[int]()
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (one / "cmdline").read_bytes().split(b"\0")
                if self._trusted in command and is_alive(int(one.name)):
                    found.add(int(one.name))
        return found

    def serving(self) -> set[int]:
        """Those whose replica runs."""
        return {pid for pid in self.all() if children(pid)}

    def end(self) -> None:
        for pid in self.all():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster, bucket: str) -> Iterator[Members]:
    url = postgres.new_database()
    members = Members(tmp_path, url, bucket, postgres, agents="local", auto_scaling_idle_s="3")
    try:
        yield members
    finally:
        members.close()
        Agents(tmp_path / "master.key").end()


@pytest.fixture
def agents(members: Members, tmp_path: Path) -> Agents:
    return Agents(tmp_path / "master.key")


def replicated(client: Client, replicas: int) -> str:
    """Deploy the base model on several replicas, and wait until all of them serve it."""
    wanted = DeploymentCreate(
        model_name=BASE, deployment_name="d", min_replicas=replicas, max_replicas=replicas
    )
    made = client.deployments.create(wanted).id
    until(lambda: client.deployments.get(made).current_replicas == replicas)
    return made


def test_all_members_ask_the_same_agents_which_outlive_their_leader(
    members: Members, agents: Agents
) -> None:
    members.start()
    deployment = replicated(members.clients[1], 2)
    first = agents.serving()
    assert len(first) == 2
    answers = Counter[str]()
    is_over = threading.Event()

    def ask(client: Client) -> None:
        while not is_over.is_set():
            answers[client.deployments.generate(deployment, PROMPT).completion] += 1

    def goes_on(more: int = 10) -> None:
        before = answers.total()
        until(lambda: answers.total() > before + more)

    leader = members.leader
    asked = [
        client
        for serve, client in zip(members.serves, members.clients, strict=True)
        if serve is not leader
    ]
    with ThreadPoolExecutor(CLIENTS) as threads:
        asking = [threads.submit(ask, client) for client in asked for _ in range(CLIENTS // 2)]
        try:
            goes_on()
            # An agent dies under clients: another one takes its place.
            os.kill(min(first), signal.SIGKILL)
            until(lambda: len(second := agents.serving()) == 2 and min(first) not in second)
            until(lambda: members.clients[0].deployments.get(deployment).current_replicas == 2)
            goes_on()
            # The leader dies: its agents go on, and the next leader goes on with them.
            second = agents.serving()
            leader.kill()
            goes_on()
            until(lambda: members.leader is not leader)
            os.kill(min(second), signal.SIGKILL)
            until(lambda: len(third := agents.serving()) == 2 and min(second) not in third)
            assert max(second) in agents.serving()
            goes_on()
        finally:
            is_over.set()
        for one in asking:
            one.result()  # every request was answered
    assert len(answers) == 1
    assert agents.all() == agents.serving()


def test_a_member_that_does_not_lead_wakes_a_model_and_it_sleeps_again(
    members: Members, agents: Agents
) -> None:
    members.start()
    leader = members.leader
    other = next(
        client
        for serve, client in zip(members.serves, members.clients, strict=True)
        if serve is not leader
    )
    wanted = DeploymentCreate(
        model_name=BASE, deployment_name="d", min_replicas=0, max_replicas=1, auto_scaling=True
    )
    deployment = other.deployments.create(wanted).id
    until(lambda: other.deployments.get(deployment).status == "running")
    for _ in range(2):
        until(lambda: agents.all() == set())
        assert other.deployments.get(deployment).current_replicas == 0
        assert other.deployments.generate(deployment, PROMPT).completion
        assert len(agents.serving()) == 1
    other.deployments.delete(deployment)
    until(lambda: agents.all() == set())
