"""Three services on one Postgres and one bucket answer as one, and go on when the one that leads is killed."""

import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.postgres_cluster import Cluster
from tests.support.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import free_port, until
from tuneship.client import Client
from tuneship.contract.endpoints import (
    CanaryEndpointCreate,
    CanaryEndpointUpdate,
    EndpointCreate,
    Member,
)
from tuneship.contract.generation import Generate
from tuneship.security.master_key import read_or_make_secret
from tuneship.settings import ClientSettings
from tuneship.store.read_cache import MAX_AGE_S

pytestmark = [pytest.mark.slow, pytest.mark.postgres]

BASE = "tuneship-tiny"
PROMPT = Generate(prompt="What is case 7?", max_tokens=4, temperature=0)


class Members:
    """Three processes, and a client for each."""

    def __init__(self, folder: Path, url: str, bucket: str, postgres: Cluster) -> None:
        key = folder / "master.key"
        read_or_make_secret(key)
        settings: dict[str, Any] = {
            "cluster": "test",
            "database_url": url,
            "blob_url": bucket,
            "master_key_file": str(key),
            "public_url": "http://cluster.test",
            "drain_notice_s": "0",
        }
        self._postgres, self._database = postgres, url.partition("?")[0].rpartition("/")[2]
        ports = {name: free_port() for name in ("a", "b", "c")}
        self.serves = [
            Serve(folder / name, "--port", str(port), **settings) for name, port in ports.items()
        ]
        credentials = ClientSettings.from_credentials(folder / "a" / "credentials.json")
        addresses = [f"http://127.0.0.1:{port}" for port in ports.values()]
        self.clients = [
            Client(credentials.model_copy(update={"url": address})) for address in addresses
        ]

    @property
    def leader(self) -> Serve:
        """The process that leads now."""
        ((owner,),) = self._postgres.run("select owner from leaders", self._database)
        (found,) = [one for one in self.serves if owner.endswith(f":{one.process.pid}")]
        return found

    def live(self) -> list[Client]:
        return [
            client
            for serve, client in zip(self.serves, self.clients, strict=True)
            if serve.process.poll() is None
        ]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for serve in self.serves:
            serve.stop()


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster, bucket: str) -> Iterator[Members]:
    members = Members(tmp_path, postgres.new_database(), bucket, postgres)
    yield members
    members.close()


def split(**shares: int) -> Any:
    return [Member(id=name, traffic_percentage=share) for name, share in shares.items()]


def test_three_members_answer_as_one_and_survive_the_kill_of_the_leader(
    members: Members, tmp_path: Path
) -> None:
    one, two, three = members.clients
    # A job that is under way when its leader is killed: dataset, job and list at three members.
    job_id = start_job(two, rows_file(tmp_path / "rows.jsonl", 64), epochs=20)
    assert [job.id for job in three.jobs.iterate()] == [job_id]

    # A deployment is made once, and each member answers from its own replicas.
    old, new = (running_deployment(three, name, BASE) for name in ("old", "new"))
    answers = {client.deployments.generate(old, PROMPT).completion for client in members.clients}
    assert len(answers) == 1

    # A split that one member has changed: at once there, everywhere after a second.
    canary = one.canary_endpoints.create(
        CanaryEndpointCreate(name="canary", deployments=split(**{old: 100, new: 0}))
    )
    assert {_answering(client, canary.id) for client in members.clients} == {old}
    for client, shares, now in ((one, {old: 0, new: 100}, new), (three, {old: 100, new: 0}, old)):
        client.canary_endpoints.update(canary.id, CanaryEndpointUpdate(deployments=split(**shares)))
        assert _answering(client, canary.id) == now
        changed = time.monotonic()
        until(lambda changed=changed: time.monotonic() > changed + MAX_AGE_S)
        assert {_answering(each, canary.id) for each in 3 * members.clients} == {now}

    until(lambda: one.jobs.get(job_id).current_step > 8)
    leader = members.leader
    leader.kill()
    kept = set[str]()
    for number, client in zip(range(30), cycle(members.live()), strict=False):
        kept.add(client.endpoints.create(EndpointCreate(name=f"e{number}", deployment_id=old)).id)
    until(lambda: members.leader is not leader)
    survivor, other = members.live()
    assert {endpoint.id for endpoint in other.endpoints.iterate()} == kept
    job = ended_job(survivor, job_id)
    assert job.fine_tuned_model is not None, job.error
    tuned = running_deployment(other, "tuned", job.fine_tuned_model)
    answers = {client.deployments.generate(tuned, PROMPT).completion for client in members.live()}
    assert len(answers) == 1


def _answering(client: Client, endpoint: str) -> str:
    return client.endpoints.generate(endpoint, PROMPT).deployment_id
