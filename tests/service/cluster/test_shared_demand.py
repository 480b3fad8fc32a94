"""The leader of a cluster adds up what all members are asked for, as long as they are there."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from tests.support.waiting import until_async
from tuneship.service.cluster.shared_demand import TOPIC, DemandTiming, SharedDemand
from tuneship.service.context.notifier import Notifier
from tuneship.service.telemetry.in_flight import Demand, InFlightGenerations
from tuneship.store.cluster import member_demand
from tuneship.store.database import tables
from tuneship.store.database.database import Database

pytestmark = pytest.mark.postgres


def now() -> datetime:
    return datetime.now(UTC)


PATIENT = DemandTiming()


class Member:
    def __init__(self, database: Database, name: str, timing: DemandTiming = PATIENT) -> None:
        self.in_flight = InFlightGenerations()
        self.notifier = Notifier()
        self.demand = SharedDemand(database, self.in_flight, self.notifier, name, now, timing)


def test_the_requests_of_all_members_are_added_up_and_awaited(database: Database) -> None:
    async def run() -> None:
        hasty = DemandTiming(publish_every_s=0.02, noticed_after=timedelta())
        one, two = Member(database, "one", hasty), Member(database, "two", hasty)
        publishing = [asyncio.create_task(member.demand.run()) for member in (one, two)]

        def demand() -> Demand:
            one.demand.read()
            return one.demand.demand_of("d")

        with one.in_flight.track("d"), two.in_flight.track("d"), two.in_flight.track("d") as last:
            last.queued(now() - timedelta(seconds=60))
            await until_async(lambda: demand().in_flight == 3 and demand().waiting == 1)
            assert demand().waited >= timedelta(seconds=60)
            assert one.demand.demand_of("other") == Demand()
            drained = asyncio.create_task(one.demand.wait_until_drained("d", 600))
            await asyncio.wait([drained], timeout=0.1)
            assert not drained.done()
        await drained
        await until_async(lambda: demand() == Demand())
        for task in publishing:
            task.cancel()
        await asyncio.gather(*publishing, return_exceptions=True)
        with database.read() as connection:
            assert member_demand.of_live(connection) == []

    asyncio.run(run())


def test_an_emptied_table_does_not_mean_that_nobody_has_requests(database: Database) -> None:
    """A crash of Postgres empties it."""

    async def run() -> None:
        one = Member(database, "one", DemandTiming(noticed_after=timedelta()))
        drained = asyncio.create_task(one.demand.wait_until_drained("d", 600))
        await asyncio.wait([drained], timeout=0.1)
        assert not drained.done()
        publishing = asyncio.create_task(one.demand.run())
        await drained
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    asyncio.run(run())


def test_a_request_that_waits_for_a_replica_is_published_at_once(database: Database) -> None:
    async def run() -> None:
        one = Member(database, "one")
        with one.notifier.listening(TOPIC) as news, one.in_flight.track("d"):
            one.demand.need()
            publishing = asyncio.create_task(one.demand.run())
            await news.wait()
            one.demand.read()
            assert one.demand.demand_of("d").in_flight == 1
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    asyncio.run(run())


def test_the_published_demand_of_a_lost_member_lapses(database: Database) -> None:
    with database.write_beside() as connection:
        member_demand.write(connection, "gone", {"d": [1, 0, 0.0, 1]})
        member_demand.write(connection, "here", {"d": [2, 0, 0.0, 2]})
        late = sa.func.clock_timestamp() - sa.func.make_interval(0, 0, 0, 0, 0, 0, 61)
        rows = sa.update(tables.member_demands).where(tables.member_demands.c.member == "gone")
        connection.execute(rows.values(lapses_at=late))
        assert [row["member"] for row in member_demand.of_live(connection)] == ["here"]
        member_demand.forget(connection)
        assert list(connection.scalars(sa.select(tables.member_demands.c.member))) == ["here"]
