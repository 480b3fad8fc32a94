"""Three services on one Postgres and one bucket answer as one, go on when the leader is killed, and are upgraded."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.cluster_members import PROMPT, Members
from tests.support.cluster.member_writers import MemberWriters
from tests.support.databases.other_versions import NEXT, next_version
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.processes import (
    Starter,
    ended_job,
    rows_file,
    running_deployment,
    start,
    start_job,
)
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.endpoints import (
    CanaryEndpointCreate,
    CanaryEndpointUpdate,
    EndpointCreate,
    Member,
)
from tuneship.contract.errors import TuneshipError
from tuneship.store.database.database import HEAD
from tuneship.store.database.read_cache import MAX_AGE_S

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.long]

BASE = "tuneship-tiny"
EPOCHS = 12
WRITERS = 32
# How often a split is changed, a member is killed, and all members are upgraded.
CHANGES, KILLS, ROUNDS = 200, 60, 10
# What a kill has met is sent once more, and that one succeeds.
TRIES = 2
# Of a curve, what differs between two jobs.
OWN = {"job_id", "created_at"}


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster, bucket: str) -> Iterator[Members]:
    with closing(Members(tmp_path, postgres.new_database(), bucket, postgres)) as members:
        yield members


def split(**shares: int) -> Any:
    return [Member(id=name, traffic_percentage=share) for name, share in shares.items()]


def test_three_members_answer_as_one_and_survive_the_kill_of_the_leader(
    members: Members, tmp_path: Path
) -> None:
    members.start()
    _, two, three = members.clients
    # A job that is running when its leader is killed: dataset, job and list at three members.
    job_id = start_job(two, rows_file(tmp_path / "rows.jsonl", 64), epochs=EPOCHS)
    assert [job.id for job in three.jobs.iterate()] == [job_id]

    # A deployment is made once, and each member answers from its own replicas.
    old = running_deployment(three, "old", BASE)
    answers = {client.deployments.generate(old, PROMPT).completion for client in members.clients}
    assert len(answers) == 1

    kept_checkpoint = "select id from jobs where checkpoint::text like '%%objects%%'"
    until(lambda: members.run(kept_checkpoint))
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
    # It has gone on from the checkpoint in the bucket, and learnt what a training without a break learns.
    messages = [entry.message for entry in survivor.jobs.logs(job_id).logs]
    assert any(", from step " in message for message in messages), messages
    again = start_job(other, tmp_path / "rows.jsonl", epochs=EPOCHS)
    assert ended_job(other, again).status == "completed"
    curves = [other.jobs.metrics(one).model_dump(exclude=OWN) for one in (job_id, again)]
    assert curves[0] == curves[1]
    tuned = running_deployment(other, "tuned", job.fine_tuned_model)
    answers = {client.deployments.generate(tuned, PROMPT).completion for client in members.live()}
    assert len(answers) == 1


@pytest.mark.soak
def test_a_split_that_any_member_changes_is_used_at_once_there_and_after_a_second_everywhere(
    members: Members,
) -> None:
    members.start()
    old, new = (running_deployment(members.clients[2], name, BASE) for name in ("old", "new"))
    canary = members.clients[0].canary_endpoints.create(
        CanaryEndpointCreate(name="canary", deployments=split(**{old: 100, new: 0}))
    )
    assert {_answering(client, canary.id) for client in members.clients} == {old}
    for _, client in zip(range(CHANGES), cycle(members.clients), strict=False):
        old, new = new, old
        shares = split(**{old: 100, new: 0})
        client.canary_endpoints.update(canary.id, CanaryEndpointUpdate(deployments=shares))
        assert _answering(client, canary.id) == old
        changed = time.monotonic()
        until(lambda changed=changed: time.monotonic() > changed + MAX_AGE_S)
        assert {_answering(each, canary.id) for each in 3 * members.clients} == {old}


def _answering(client: Client, endpoint: str) -> str:
    return client.endpoints.generate(endpoint, PROMPT).deployment_id


@pytest.mark.soak
def test_writes_are_neither_refused_nor_lost_nor_doubled_when_members_are_killed(
    members: Members,
) -> None:
    """Every other victim is the leader."""
    members.start()
    deployment = running_deployment(members.clients[0], "d", BASE)
    writers = MemberWriters(members, deployment, WRITERS, TRIES)
    with writers.at_work(pause_s=0.5):
        for number in range(KILLS):
            leader = members.leader
            follower = next(one for one in members.serves if one is not leader)
            victim = follower if number % 2 else leader
            victim.kill()
            if victim is leader:
                until(lambda leader=leader: members.leader is not leader)
            victim.start()
            before = len(writers.acknowledged)
            until(lambda before=before: len(writers.acknowledged) > before + WRITERS)
    assert writers.failures == []
    assert writers.lost_and_doubled() == (0, 0)


class Balancer:
    """Deals requests out to one member after the other, and leaves out those that are about to end."""

    def __init__(self, clients: list[Client]) -> None:
        self._clients = clients
        self._turns = cycle(range(len(clients)))
        self._out = set[int]()
        self._at_work = Counter[int]()
        self._lock = threading.Lock()

    @contextmanager
    def member(self) -> Iterator[Client]:
        with self._lock:
            number = next(one for one in self._turns if one not in self._out)
            self._at_work[number] += 1
        try:
            yield self._clients[number]
        finally:
            with self._lock:
                self._at_work[number] -= 1

    def take_out(self, number: int) -> None:
        """Send it nothing more, and wait for its answers."""
        with self._lock:
            self._out.add(number)
        until(lambda: not self._at_work[number])

    def put_back(self, number: int) -> None:
        with self._lock:
            self._out.discard(number)


@pytest.mark.soak
def test_a_rolling_upgrade_refuses_nothing_and_loses_nothing(
    members: Members, tmp_path: Path
) -> None:
    members.start(notice_s=600)
    clients = [client.with_options(tries=1) for client in members.clients]
    balancer, ended = Balancer(clients), threading.Event()
    deployment = running_deployment(clients[0], "d", BASE)
    kept, failures = list[str](), list[TuneshipError]()

    def work(name: str) -> None:
        for number in count():
            if ended.is_set():
                return
            try:
                with balancer.member() as client:
                    wanted = EndpointCreate(name=f"{name}{number}", deployment_id=deployment)
                    kept.append(client.endpoints.create(wanted).id)
                with balancer.member() as client:
                    client.endpoints.get(kept[-1])
            except TuneshipError as error:
                failures.append(error)
                return
            ended.wait(0.2)

    def restart(number: int, starter: Starter) -> None:
        serve = members.serves[number]
        serve.process.send_signal(signal.SIGTERM)
        ready = f"{members.addresses[number]}/readyz"
        until(lambda: httpx.get(ready).status_code == 503)
        before = len(kept)
        until(lambda: len(kept) > before or failures)  # it still serves
        balancer.take_out(number)
        serve.stop()
        serve.starter = starter
        serve.start()
        balancer.put_back(number)

    workers = [threading.Thread(target=work, args=(name,)) for name in ("x", "y")]
    for worker in workers:
        worker.start()
    # A version whose tables these members cannot use does not start beside them.
    other = next_version(tmp_path / "other", works_with=NEXT)
    settings = {f"TUNESHIP_{name.upper()}": value for name, value in members.settings.items()}
    refused = other(
        *("tuneship.cli.main", "serve", "--port", "0", "--data-dir", str(tmp_path / "d")),
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
    )
    assert "cannot continue with the tables of this version" in refused.communicate()[1]
    assert refused.returncode
    newer = next_version(tmp_path / "next", works_with=HEAD)
    # In the end one of them goes back to the version before.
    for number, starter in ROUNDS * [(0, newer), (1, newer), (2, newer), (0, start)]:
        restart(number, starter)
    ended.set()
    for worker in workers:
        worker.join()
    assert failures == []
    revision = "select version_num from alembic_version"
    assert members.run(revision) == [(NEXT,)]
    for client in clients:
        assert {endpoint.id for endpoint in client.endpoints.iterate()} == {*kept}
