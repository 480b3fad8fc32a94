"""The agents that the members of a cluster share. The leader alone writes these rows; all members read them.

An agent is `starting` until its replica can be asked, then `ready`, with its address and the SHA-256 of its
certificate. While it is `leaving` it gets nothing new. A row is removed when its agent has ended or is given up.
"""

from enum import StrEnum

import sqlalchemy as sa

from tuneship.store import queries as rows
from tuneship.store.row_types import AgentRow
from tuneship.store.tables import agents


class AgentStanding(StrEnum):
    """The states of an agent between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


def of_all(connection: sa.Connection) -> list[AgentRow]:
    """All rows, the oldest replica first."""
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
    """Let all members use an agent."""
    place = {"host": host, "port": port, "certificate": certificate}
    _set(connection, name, state=AgentStanding.READY, **place)


def set_leaving(connection: sa.Connection, name: str) -> None:
    """Let no member send anything new to an agent."""
    _set(connection, name, state=AgentStanding.LEAVING)


def remove(connection: sa.Connection, name: str) -> None:
    """Forget an agent."""
    connection.execute(sa.delete(agents).where(agents.c.name == name))


def _set(connection: sa.Connection, name: str, **values: str | int) -> None:
    connection.execute(sa.update(agents).where(agents.c.name == name).values(**values))
