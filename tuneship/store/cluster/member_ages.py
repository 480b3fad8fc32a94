"""The ages of the requests in flight at each member of a cluster, so that any member can answer for all.

A member writes its own row alone, once a second, by the database's clock. Postgres only.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from tuneship.store.database import rows
from tuneship.store.database.tables import MemberAgesRow, member_ages

# A member that has written nothing for this long is gone, or cannot reach the database.
LAPSE_AFTER = timedelta(seconds=6)
NOW = sa.func.clock_timestamp()

# By deployment and endpoint: how many requests are in each bucket of `AGES_MS`, the last one of older ones.
Ages = Mapping[str, Mapping[str, list[int]]]


def write(connection: sa.Connection, member: int, ages: Ages) -> None:
    """Write the ages of a member's requests; `member` is its number."""
    values = {"written_at": NOW, "ages": ages}
    row = insert(member_ages).values(member=str(member), **values)
    connection.execute(
        row.on_conflict_do_update(index_elements=[member_ages.c.member], set_=values)
    )


def of_others(connection: sa.Connection, member: int, since: datetime) -> list[MemberAgesRow]:
    """The rows of the other members that were written since a moment."""
    is_recent = member_ages.c.written_at >= since, member_ages.c.written_at > NOW - LAPSE_AFTER
    return rows.matching(connection, member_ages, member_ages.c.member != str(member), *is_recent)


def forget(connection: sa.Connection) -> None:
    """Delete the rows of members that have been gone for a minute."""
    gone = member_ages.c.written_at < NOW - timedelta(minutes=1)
    connection.execute(sa.delete(member_ages).where(gone))
