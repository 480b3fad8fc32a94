"""The log of a deployment: state changes, replicas, failed generations. Lines never hold prompts, outputs or tags.

Lines are ordered by (timestamp, id), and a page starts after such a position. They are kept for a limited time and up
to a limited number.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from tuneship.store.database.rows import fetch_all
from tuneship.store.database.tables import DeploymentLogRow, deployment_logs

LEVELS = ("debug", "info", "warning", "error")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Ids are below 2^63, so the moment above them decides first, as in the order of the log.
ID_BITS = 64


@dataclass(frozen=True)
class LogEntry:
    """One line of a log; `component` is the part of the service that wrote it (`supervisor`, `replica`, `generate`)."""

    deployment_id: str
    timestamp: datetime
    level: str
    component: str
    message: str
    request_id: str | None = None


@dataclass(frozen=True)
class LogPosition:
    """The position of a line in its log."""

    timestamp: datetime
    id: int

    def as_number(self) -> int:
        """Encode the position for a cursor: microseconds since the epoch in the high bits, the id in the low ones."""
        return ((self.timestamp - EPOCH) // timedelta(microseconds=1) << ID_BITS) + self.id


def position_of(number: int) -> LogPosition:
    """Decode a position that `as_number` encoded."""
    moment = EPOCH + timedelta(microseconds=number >> ID_BITS)
    return LogPosition(moment, number & ((1 << ID_BITS) - 1))


def add(connection: sa.Connection, *entries: LogEntry) -> None:
    """Append lines."""
    if entries:
        connection.execute(sa.insert(deployment_logs), [asdict(entry) for entry in entries])


def lines(
    connection: sa.Connection,
    where: Sequence[sa.ColumnElement[bool]],
    *,
    descending: bool,
    after: LogPosition | None,
    limit: int,
) -> list[DeploymentLogRow]:
    """Up to `limit` lines after a position, in order of time, newest first if `descending`."""
    moment, number = deployment_logs.c.timestamp, deployment_logs.c.id
    order = (moment.desc(), number.desc()) if descending else (moment, number)
    query = sa.select(deployment_logs).where(*where).order_by(*order).limit(limit)
    if after is not None:
        same = moment == after.timestamp
        query = query.where(
            (moment < after.timestamp) | (same & (number < after.id))
            if descending
            else (moment > after.timestamp) | (same & (number > after.id))
        )
    return fetch_all(connection, query)


def forget(connection: sa.Connection, before: datetime, most: int) -> None:
    """Delete lines older than `before`, and all but the newest `most` lines of each deployment."""
    table = deployment_logs
    connection.execute(sa.delete(table).where(table.c.timestamp < before))
    # Few deployments have too many lines, and only theirs have to be sorted.
    crowded = (
        sa.select(table.c.deployment_id)
        .group_by(table.c.deployment_id)
        .having(sa.func.count() > most)
    )
    for deployment_id in list(connection.scalars(crowded)):
        of_it = table.c.deployment_id == deployment_id
        newest = (
            sa.select(table.c.id)
            .where(of_it)
            .order_by(table.c.timestamp.desc(), table.c.id.desc())
            .limit(most)
        )
        kept = sa.select(newest.subquery().c.id)
        connection.execute(sa.delete(table).where(of_it, table.c.id.not_in(kept)))
