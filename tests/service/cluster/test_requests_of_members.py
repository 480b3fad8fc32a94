"""Any member of a cluster answers for the requests in flight of all that are there."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tests.support.waiting import until
from tuneship.store.cluster import member_ages
from tuneship.store.database.database import Database
from tuneship.store.database.tables import member_ages as table

pytestmark = pytest.mark.postgres


def test_any_member_answers_for_the_requests_of_all(members: list[Service]) -> None:
    one, two = members
    deployment = one.deployment("d")

    def seen(asked: Service) -> int:
        answer = asked.call("GET", f"/v1/deployments/{deployment}/metrics")
        snapshot = answer.json()["in_flight"]
        assert snapshot["ages_ms"]["counts"][-1] == snapshot["requests"]
        return snapshot["requests"]

    with (
        two.parts.in_flight.track(deployment) as first,
        one.parts.in_flight.track(deployment) as own,
    ):
        first.accepted = own.accepted = 0.0
        until(lambda: seen(one) == seen(two) == 2)
        two.rest()
        until(lambda: seen(one) == 1, 60)
    until(lambda: seen(one) == 0)


def test_ages_of_a_member_that_is_gone_or_of_an_earlier_bucket_are_left_out(
    database: Database,
) -> None:
    with database.write_beside() as connection:
        for number in (1, 2, 3):
            member_ages.write(connection, number, {"dep_a": {"": [number]}})
        now = connection.execute(sa.select(member_ages.NOW)).scalar_one()
        late = sa.update(table).where(table.c.member == "3")
        connection.execute(late.values(written_at=now - timedelta(seconds=61)))
        hour = timedelta(hours=1)
        others = member_ages.of_others(connection, 1, now - hour)
        assert [(row["member"], row["ages"]) for row in others] == [("2", {"dep_a": {"": [2]}})]
        assert member_ages.of_others(connection, 1, now + hour) == []
        member_ages.forget(connection)
        assert set(connection.scalars(sa.select(table.c.member))) == {"1", "2"}
