"""One of several services on a Postgres leads; another takes over, and late writes of the first one are refused."""

import asyncio
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tests.support.cluster.members import SHORT_LEASE_S, cluster_of, standing_still
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.in_process import Service
from tests.support.waiting import until, until_async
from tuneship.service.cluster.leadership import LeaseLeadership, SoleService
from tuneship.store.cluster import leader_lease
from tuneship.store.cluster.leader_lease import LeadershipLost
from tuneship.store.database import tables
from tuneship.store.database.database import Database, Fence
from tuneship.store.records import job_records

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def fence_of(service: Service) -> Fence:
    """The fence of the term in which the service leads now, as its background work gets it."""
    found: list[Fence] = []

    async def lead(fence: Fence | None) -> None:
        assert fence is not None
        found.append(fence)

    asyncio.run_coroutine_threadsafe(service.leadership.while_leading(lead), service.loop)
    return until(lambda: found)[0]


def write(service: Service, fence: Fence, text: str) -> None:
    with service.database.fenced(fence).write() as connection:
        job_records.add_log(connection, "ft_1", NOW, "info", text)


def written(service: Service) -> list[str]:
    with service.database.read() as connection:
        # Ids are given under the writers' lock, so they count the commits.
        query = sa.select(tables.job_logs.c.message).order_by(tables.job_logs.c.id)
        return list(connection.scalars(query))


def epoch_of(service: Service) -> int:
    with service.database.read() as connection:
        return connection.execute(sa.select(tables.leaders.c.epoch)).scalar_one()


def test_a_service_that_is_alone_leads_always_and_needs_no_fence() -> None:
    fences: list[Fence | None] = []

    async def lead(fence: Fence | None) -> None:
        fences.append(fence)

    sole = SoleService()
    asyncio.run(sole.while_leading(lead))
    assert (sole.leads, fences) == (True, [None])


def test_a_leader_that_ends_is_followed_by_another(members: list[Service]) -> None:
    first, second = members
    fence, epoch = fence_of(first), epoch_of(first)
    write(first, fence, "first")
    assert (first.leadership.leads, second.leadership.leads) == (True, False)
    with pytest.raises(LeadershipLost):
        write(second, second.leadership.fence, "never")

    first.rest()
    until(lambda: second.leadership.leads)
    write(second, fence_of(second), "second")
    with pytest.raises(LeadershipLost):
        write(first, fence, "never")
    assert written(second) == ["first", "second"]
    assert epoch_of(second) > epoch


def test_a_leader_that_stands_still_is_followed_and_can_write_nothing_later(
    lapsing: list[Service],
) -> None:
    first, second = lapsing
    old, epochs = fence_of(first), [epoch_of(first)]
    with standing_still(first):
        until(lambda: second.leadership.leads)
        write(second, fence_of(second), "second")
        epochs.append(epoch_of(second))
        assert not first.leadership.leads
        with pytest.raises(LeadershipLost):
            write(first, old, "never")
    # It leads again later, but what it began before stays refused.
    second.rest()
    until(lambda: first.leadership.leads)
    with pytest.raises(LeadershipLost):
        write(first, old, "never")
    write(first, fence_of(first), "third")
    assert written(first) == ["second", "third"]
    epochs.append(epoch_of(first))
    assert sorted({*epochs}) == epochs


def test_a_leader_that_stands_still_inside_a_transaction_holds_nobody_up(
    lapsing: list[Service],
) -> None:
    first, second = lapsing
    fence, follows, outcome = fence_of(first), threading.Event(), list[object]()

    def write_slowly() -> None:
        try:
            with first.database.fenced(fence).write() as connection:
                job_records.add_log(connection, "ft_1", NOW, "info", "never")
                follows.wait()
        except DBAPIError as error:
            outcome.append(error)

    writer = threading.Thread(target=write_slowly)
    with standing_still(first):
        writer.start()
        until(lambda: second.leadership.leads)
        write(second, fence_of(second), "second")
        follows.set()
        writer.join()
    assert len(outcome) == 1
    assert written(second) == ["second"]


def test_a_leader_without_a_database_stops_to_act(
    lapsing: list[Service], postgres: Cluster
) -> None:
    first, second = lapsing
    epoch = epoch_of(first)
    url = first.database.engine.url.render_as_string(hide_password=False)
    postgres.refuse(url, refuses=True)
    until(lambda: not first.leadership.leads)
    postgres.refuse(url, refuses=False)
    until(lambda: first.leadership.leads or second.leadership.leads)
    assert epoch_of(first) > epoch


def test_a_leader_whose_epoch_the_database_has_lost_is_followed_by_a_later_one(
    members: list[Service],
) -> None:
    """As after a failover to a standby that had not got the newest rows yet."""
    first, second = members
    fence, epoch = fence_of(first), epoch_of(first)
    with first.database.write() as connection:
        connection.execute(sa.update(tables.leaders).values(owner="an earlier one", epoch=1))
        earlier = {"epoch": 1, "lease_until": sa.func.now()}
        connection.execute(sa.update(tables.leader_leases).values(**earlier))
    with pytest.raises(LeadershipLost):
        write(first, fence, "never")
    until(lambda: second.leadership.leads)
    assert epoch_of(second) > epoch
    with pytest.raises(LeadershipLost):
        write(first, fence, "never")
    write(second, fence_of(second), "second")
    assert written(second) == ["second"]


def test_a_failure_that_nobody_has_foreseen_ends_no_choice_of_a_leader(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        member = LeaseLeadership(database, "member", 1.0)
        choosing = asyncio.create_task(member.run())
        with monkeypatch.context() as failing:
            failing.setattr(leader_lease, "take", fail)
            await asyncio.wait([choosing], timeout=0.2)
        await until_async(lambda: member.leads)
        with monkeypatch.context() as failing:
            failing.setattr(leader_lease, "renew", fail)
            await until_async(lambda: not member.leads)
        await until_async(lambda: member.leads)
        choosing.cancel()
        await asyncio.gather(choosing, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.soak)])
def test_no_write_of_an_earlier_leader_comes_after_one_of_a_later(
    tmp_path: Path, postgres: Cluster, rounds: int
) -> None:
    """Every member writes all the time in the right of its leadership, also while its event loop stands still."""
    ended, committed = threading.Event(), set[int]()

    def write_always(service: Service) -> None:
        while not ended.is_set():
            with suppress(LeadershipLost, DBAPIError):
                with service.database.fenced(service.leadership.fence).write() as connection:
                    epoch = connection.execute(sa.select(tables.leaders.c.epoch)).scalar_one()
                    job_records.add_log(connection, "ft_1", NOW, "info", str(epoch))
                committed.add(epoch)
                continue
            ended.wait(0.01)  # it may lead later

    with cluster_of(tmp_path, postgres.new_database(), 3, SHORT_LEASE_S) as members:
        writers = [threading.Thread(target=write_always, args=(one,)) for one in members]
        for writer in writers:
            writer.start()
        for count in range(1, rounds + 1):
            # On a busy machine a member may lead and lose its lease again before it has written anything.
            until(lambda count=count: len(committed) >= count)
            leader = until(lambda: [one for one in members if one.leadership.leads])[0]
            with standing_still(leader):
                until(lambda count=count: len(committed) > count)
        ended.set()
        for writer in writers:
            writer.join()
        epochs = [int(text) for text in written(members[0])]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) > rounds
