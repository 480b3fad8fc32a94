"""The demand at each member of a cluster, by deployment: the leader adds it up.

A member writes its own row alone, beside all other writers. A row that was not written for a while counts no more, by
the database's clock. Postgres only.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from tuneship.store.database import rows
from tuneship.store.database.tables import MemberDemandRow, member_demands

# A member that has not written for this long is gone, or cannot reach the database.
LAPSES_AFTER_S = 6.0
NOW = sa.func.clock_timestamp()


def write(connection: sa.Connection, member: str, demand: Mapping[str, Any]) -> None:
    """Write a member's demand."""
    lapse = NOW + sa.func.make_interval(0, 0, 0, 0, 0, 0, LAPSES_AFTER_S)
    values = {"written_at": NOW, "lapses_at": lapse, "demand": dict(demand)}
    row = insert(member_demands).values(member=member, **values)
    connection.execute(
        row.on_conflict_do_update(index_elements=[member_demands.c.member], set_=values)
    )


def of_live(connection: sa.Connection) -> list[MemberDemandRow]:
    """The rows of the members that are there."""
    return rows.matching(connection, member_demands, member_demands.c.lapses_at > NOW)


def forget(connection: sa.Connection) -> None:
    """Delete the rows of members that have been gone for a minute."""
    gone = member_demands.c.lapses_at < NOW - sa.func.make_interval(0, 0, 0, 0, 0, 1)
    connection.execute(sa.delete(member_demands).where(gone))


def remove(connection: sa.Connection, member: str) -> None:
    """Delete the row of a member that ends."""
    connection.execute(sa.delete(member_demands).where(member_demands.c.member == member))
