"""Every member obeys the end of a rollout's lease by the database's clock, also while the leader stands still."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.cluster.cluster_members import PROMPT, Members
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.processes import Serve, running_deployment
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.endpoints import (
    CanaryEndpointCreate,
    CanaryEndpointUpdate,
    LeaseRequest,
    Member,
)

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.long]

BASE = "tuneship-tiny"
# Leases that lapse at about the same time.
TOGETHER = 5
LEASE_S = 3
# A member's reading of the database's clock is wrong by a tenth of a second at most, and a cached row is a second old.
ALLOWED = timedelta(seconds=1)
EARLY = timedelta(seconds=0.3)


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster, bucket: str) -> Iterator[Members]:
    limits = {"generate_requests_per_minute": "0"}
    with closing(Members(tmp_path, postgres.new_database(), bucket, postgres, **limits)) as members:
        yield members


class DatabaseTime:
    """The database's own clock, and the leases as it has them."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def now(self) -> datetime:
        return self._read("select clock_timestamp()")

    def end_of(self, endpoint: str) -> datetime | None:
        """When a lease lapses; None once its end is stored."""
        return self._read("select lease_until from endpoints where id = :id", id=endpoint)

    def _read(self, statement: str, **values: str) -> Any:
        with self._engine.connect() as connection:
            return connection.execute(sa.text(statement), values).scalar_one()

    def close(self) -> None:
        self._engine.dispose()


@dataclass(frozen=True)
class TimedAnswer:
    """An answer of an endpoint; the times are the database's, before the request and after the answer."""

    endpoint: str
    deployment: str
    sent: datetime
    received: datetime


def all_to(deployment: str) -> list[Member]:
    return [Member(id=deployment, traffic_percentage=100)]


def shifted(client: Client, endpoint: str, old: str, new: str, time: DatabaseTime) -> datetime:
    """Give the candidate all traffic for some seconds; returns when the lease lapses."""
    lease = LeaseRequest(seconds=LEASE_S, fallback=all_to(old))
    change = CanaryEndpointUpdate(deployments=all_to(new), lease=lease)

    def change_and_read() -> datetime | None:
        client.canary_endpoints.update(endpoint, change)
        return time.end_of(endpoint)  # a test that stood still this long asks again

    return until(change_and_read)


def asked(client: Client, endpoint: str, time: DatabaseTime) -> TimedAnswer:
    sent = time.now()
    deployment = client.endpoints.generate(endpoint, PROMPT).deployment_id
    return TimedAnswer(endpoint, deployment, sent, time.now())


@contextmanager
def standing_still(serve: Serve | None) -> Iterator[None]:
    """Stop a process meanwhile, if there is one."""
    if serve is None:
        yield
        return
    serve.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        serve.process.send_signal(signal.SIGCONT)


def until_back(
    client: Client, endpoints: Sequence[str], old: str, time: DatabaseTime
) -> list[TimedAnswer]:
    """Ask each endpoint until the fallback answers; returns all answers."""
    answers, left = list[TimedAnswer](), [*endpoints]

    def are_back() -> bool:
        found = [asked(client, endpoint, time) for endpoint in left]
        answers.extend(found)
        left[:] = [one.endpoint for one in found if one.deployment != old]
        return not left

    until(are_back)
    return answers


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_no_member_asks_the_candidate_after_its_lease_also_while_the_leader_stands_still(
    members: Members, rounds: int
) -> None:
    """Each round has five lapses; in every other one the leader is stopped before them."""
    members.start()
    old, new = (running_deployment(members.clients[0], name, BASE) for name in ("old", "new"))
    wanted = [
        CanaryEndpointCreate(name=f"c{number}", deployments=all_to(old))
        for number in range(TOGETHER)
    ]
    canaries = [members.clients[0].canary_endpoints.create(one).id for one in wanted]
    last, apart = list[timedelta](), list[timedelta]()
    with closing(DatabaseTime(members.settings["database_url"])) as time:
        for number in range(rounds):
            client = members.clients[number % len(members.clients)]
            ends = {canary: shifted(client, canary, old, new, time) for canary in canaries}
            for each in members.clients:
                until(partial(is_new_or_over, each, ends, new, time))
            stopped = members.leader if number % 2 else None
            found = answers_around(members, ends, old, time, stopped)
            last.append(check_answers(found, ends, old))
            apart += [spread_of(canary, old, found) for canary in canaries]
            # What stood still knows the time at once when it goes on.
            for each in members.clients:
                assert {asked(each, canary, time).deployment for canary in canaries} == {old}
    print(  # noqa: T201 - the figures of the run
        f"{len(apart)} lapses: the last request to a candidate {max(last).total_seconds():.3f} s after its lease, "
        f"members at most {max(apart).total_seconds():.3f} s apart"
    )


def is_new_or_over(
    client: Client, ends: Mapping[str, datetime], new: str, time: DatabaseTime
) -> bool:
    """Whether a member asks the candidate of each endpoint whose lease has not lapsed."""
    answers = [asked(client, endpoint, time) for endpoint in ends]
    return all(one.deployment == new or one.received > ends[one.endpoint] for one in answers)


def answers_around(
    members: Members,
    ends: Mapping[str, datetime],
    old: str,
    time: DatabaseTime,
    stopped: Serve | None,
) -> list[list[TimedAnswer]]:
    """The answers of each member that does not stand still, from shortly before the first lapse on."""
    awake = [
        client
        for serve, client in zip(members.serves, members.clients, strict=True)
        if serve is not stopped
    ]
    with standing_still(stopped), ThreadPoolExecutor(len(awake)) as threads:
        until(lambda: time.now() > min(ends.values()) - EARLY)
        return [*threads.map(lambda client: until_back(client, [*ends], old, time), awake)]


def check_answers(
    found: Sequence[Sequence[TimedAnswer]], ends: Mapping[str, datetime], old: str
) -> timedelta:
    """Check that each answer is of the deployment whose turn it was; returns when the candidate was last asked."""
    last = -EARLY
    for answer in (one for answers in found for one in answers):
        if answer.deployment == old:
            assert answer.received >= ends[answer.endpoint] - ALLOWED
        else:
            last = max(last, answer.sent - ends[answer.endpoint])
    assert last <= ALLOWED
    return last


def spread_of(endpoint: str, old: str, found: Sequence[Sequence[TimedAnswer]]) -> timedelta:
    """How far the moments lie apart at which members were first seen to ask the fallback of an endpoint."""
    firsts = [
        next(one.sent for one in answers if (one.endpoint, one.deployment) == (endpoint, old))
        for answers in found
    ]
    return max(firsts) - min(firsts)
