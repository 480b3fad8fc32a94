"""Three services of one cluster ask the same agents, which outlive the service that has started them."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster.cluster_members import PROMPT, Members
from tests.support.databases.postgres_cluster import Cluster
from tests.support.faults.repeating import repeating
from tests.support.waiting import children, is_alive, until
from tuneship.agents.certificates import PURPOSE, AgentAuthority
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate
from tuneship.security.master_key import derived_secret, read_or_make_secret

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.long]

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


def followers(members: Members) -> list[Client]:
    """The clients of the members that run and do not lead."""
    leader = members.leader
    return [
        client
        for serve, client in zip(members.serves, members.clients, strict=True)
        if serve is not leader and serve.process.poll() is None
    ]


def test_all_members_ask_the_same_agents_which_outlive_their_leader(
    members: Members, agents: Agents
) -> None:
    members.start()
    deployment = replicated(members.clients[1], 2)
    first = agents.serving()
    assert len(first) == 2
    answers = Counter[str]()

    def ask(client: Client) -> None:
        answers[client.deployments.generate(deployment, PROMPT).completion] += 1

    def goes_on() -> None:
        before = answers.total()
        until(lambda: answers.total() > before + 2 * CLIENTS)

    def replaced(victim: int) -> set[int]:
        return until(
            lambda: len(left := agents.serving() - {victim}) == 2 and victim not in left and left
        )

    leader, asked = members.leader, followers(members)
    # Every request is answered.
    with repeating(*[partial(ask, client) for client in asked for _ in range(CLIENTS // 2)]):
        goes_on()
        os.kill(min(first), signal.SIGKILL)
        second = replaced(min(first))
        until(lambda: members.clients[0].deployments.get(deployment).current_replicas == 2)
        leader.kill()
        goes_on()
        until(lambda: members.leader is not leader)
        # An agent that stands still says nothing more, and its connections do not break.
        os.kill(min(second), signal.SIGSTOP)
        third = replaced(min(second))
        assert max(second) in third  # the next leader has adopted it
        goes_on()
    assert len(answers) == 1

    # A member that does not lead wakes a model, which sleeps again, and the last agent ends.
    os.kill(min(second), signal.SIGKILL)
    other = followers(members)[0]
    other.deployments.delete(deployment)
    until(lambda: agents.all() == set())
    wanted = DeploymentCreate(
        model_name=BASE, deployment_name="e", min_replicas=0, max_replicas=1, auto_scaling=True
    )
    sleeper = other.deployments.create(wanted).id
    until(lambda: other.deployments.get(sleeper).status == "running")
    until(lambda: agents.all() == set())
    assert other.deployments.generate(sleeper, PROMPT).completion
    assert len(agents.serving()) == 1
    other.deployments.delete(sleeper)
    until(lambda: agents.all() == set())
