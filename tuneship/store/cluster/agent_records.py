"""The agents that the members of a cluster share. Only the leader writes these rows; all members read them.

An agent is `starting` until its replica can be asked, then `ready`, with its address and the SHA-256 of its
certificate. While it is `leaving` it gets nothing new. A row is removed when its agent has ended or is given up. How
starts have failed, by base model, is in rows of their own. Postgres only.
"""

from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from tuneship.store.database import rows
from tuneship.store.database.tables import AgentRow, agents, failed_starts

NOW = sa.func.clock_timestamp()


class AgentStanding(StrEnum):
    """The states of an agent between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


def of_all(connection: sa.Connection) -> list[AgentRow]:
    """All rows, in the order of the replicas' age, oldest first."""
    return rows.fetch_all(connection, sa.select(agents).order_by(agents.c.number))


def add(connection: sa.Connection, name: str, base: str, digest: str) -> int:
    """Add an agent that is about to be started, and return the number of its replica, higher than all others' now."""
    last = connection.scalar(sa.select(sa.func.max(agents.c.number)))
    number = 0 if last is None else last + 1
    connection.execute(
        sa.insert(agents).values(
            name=name, base=base, digest=digest, number=number, state=AgentStanding.STARTING
        )
    )
    return number


def set_ready(connection: sa.Connection, name: str, host: str, port: int, certificate: str) -> None:
    """Let all members use an agent: a start has succeeded."""
    place = {"host": host, "port": port, "certificate": certificate}
    _set(connection, name, state=AgentStanding.READY, **place)
    base = sa.select(agents.c.base).where(agents.c.name == name).scalar_subquery()
    has_failed = (failed_starts.c.base == base) & (failed_starts.c.in_a_row > 0)
    values = {"in_a_row": 0, "error": "", "paused_until": NOW}
    connection.execute(sa.update(failed_starts).where(has_failed).values(**values))


def set_leaving(connection: sa.Connection, name: str) -> None:
    """Stop new requests of all members to an agent."""
    _set(connection, name, state=AgentStanding.LEAVING)


def remove(connection: sa.Connection, name: str) -> None:
    """Forget an agent."""
    connection.execute(sa.delete(agents).where(agents.c.name == name))


@dataclass(frozen=True)
class ReportedFailures:
    """The failed starts of a base model's replicas, as the leader has reported them."""

    # Id of the base model.
    base: str
    total: int
    in_a_row: int
    # Why the last one failed.
    error: str
    # Seconds until the leader tries the next one, by the database's clock; not positive where it may.
    pause_s: float


def failures(connection: sa.Connection) -> list[ReportedFailures]:
    """The failed starts of all base models that had any."""
    table = failed_starts.c
    pause_s = sa.extract("epoch", table.paused_until - NOW)
    query = sa.select(table.base, table.total, table.in_a_row, table.error, pause_s)
    return [
        ReportedFailures(base, total, in_a_row, error, float(left_s))
        for base, total, in_a_row, error, left_s in connection.execute(query)
    ]


def note_failure(
    connection: sa.Connection, base: str, in_a_row: int, error: str, pause_s: float
) -> None:
    """Note that one more start has failed, and that the next one is tried after a pause."""
    paused_until = NOW + sa.func.make_interval(0, 0, 0, 0, 0, 0, pause_s)
    values = {"in_a_row": in_a_row, "error": error, "paused_until": paused_until}
    row = insert(failed_starts).values(base=base, total=1, **values)
    more = {**values, "total": failed_starts.c.total + 1}
    connection.execute(row.on_conflict_do_update(index_elements=[failed_starts.c.base], set_=more))


def _set(connection: sa.Connection, name: str, **values: str | int) -> None:
    connection.execute(sa.update(agents).where(agents.c.name == name).values(**values))
