"""PostgreSQL fails over to a standby: the members go on with it by themselves, and what was acknowledged is there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.service.cluster.test_leadership import epoch_of
from tests.service.cluster.test_writers import upload
from tests.support.cluster.members import SHORT_LEASE_S, cluster_of
from tests.support.databases.postgres_cluster import SETTINGS, Cluster, Standby, programs
from tests.support.service.in_process import Service
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.postgres]


@pytest.fixture
def servers() -> Iterator[tuple[Cluster, Standby]]:
    """A primary that acknowledges what its standby has stored, too."""
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL on this machine: .ci/run installs it")
    primary = Cluster(found, {**SETTINGS, "synchronous_commit": "on"})
    standby = Standby(found, primary)
    primary.run("alter system set synchronous_standby_names = '*'")
    primary.run("select pg_reload_conf()")
    until(lambda: primary.run("select 1 from pg_stat_replication where sync_state = 'sync'"))
    yield primary, standby
    primary.remove()
    standby.remove()


@contextmanager
def uploading(members: list[Service]) -> Iterator[tuple[set[str], set[int]]]:
    """Upload datasets at every member all the time; yields the ids that were acknowledged, and all statuses."""
    acknowledged, statuses, ended = set[str](), set[int](), threading.Event()

    def upload_always(member: Service, name: str) -> None:
        for number in count():
            status, identifier = upload(member, "alice", f"{name} {number}")
            statuses.add(status)
            if status == 201:
                acknowledged.add(identifier)
            if ended.wait(0.05):
                return

    writers = [
        threading.Thread(target=upload_always, args=(one, f"member {number}"))
        for number, one in enumerate(members)
    ]
    for writer in writers:
        writer.start()
    try:
        yield acknowledged, statuses
    finally:
        ended.set()
        for writer in writers:
            writer.join()


def test_members_go_on_with_a_promoted_standby_and_nothing_acknowledged_is_lost(
    tmp_path: Path, servers: tuple[Cluster, Standby]
) -> None:
    primary, standby = servers
    database = primary.new_database().partition("?")[0]
    url = f"{database}?host={primary.folder},{standby.folder}&target_session_attrs=read-write"
    with cluster_of(tmp_path, url, lease_s=SHORT_LEASE_S) as members:
        leader, other = members
        kept = leader.deployment("kept")
        epoch = epoch_of(leader)
        with uploading(members) as (acknowledged, statuses):
            until(lambda: len(acknowledged) > 10)
            primary.kill()
            for member in members:
                until(lambda one=member: one.call("GET", "/v1/datasets").status_code == 503)
            until(lambda: not leader.leadership.leads)
            before = len(acknowledged)
            standby.promote()
            until(lambda: len(acknowledged) > before + 10)
        assert statuses == {201, 503}
        for member in members:
            until(lambda one=member: one.call("GET", "/readyz").status_code == 200)
            found = member.call("GET", "/v1/datasets?limit=1").json()
            assert found["pagination"]["total"] >= len(acknowledged)
            for one in acknowledged:
                assert member.call("GET", f"/v1/datasets/{one}").status_code == 200
            assert member.deployment_status(kept) == "running"
        until(lambda: leader.leadership.leads or other.leadership.leads)
        assert epoch_of(leader) > epoch
        # The leader works there, too.
        assert other.deployment_status(other.deployment("made")) == "running"
