"""The single row about the installation that a database belongs to: id, number of starts, master key, newest time.

`look` inspects a database before anything in it is changed: a service that was given the wrong database, or an empty
one, must find out before it creates a table.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import cast

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from tuneship.store.database.database import PoolerInBetween, engine_of, known_revision
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.tables import InstallationRow, api_keys, installation


@dataclass(frozen=True)
class FoundDatabase:
    """The state in which a database was found."""

    # Whether a service has used it; every service makes an API key at its first start.
    is_used: bool = False
    # Id of the installation; None in a new database.
    id: str | None = None
    starts: int = 0
    # Name of the cluster that uses it; None for a service that is alone.
    cluster: str | None = None


def look(url: str) -> FoundDatabase:
    """Inspect a database without changing or creating it.

    Raises `UnknownDatabase`, `OtherSchema`, `PoolerInBetween` and SQLAlchemy's errors.
    """
    engine = engine_of(url)
    try:
        if engine.dialect.name == "sqlite":
            file = Path(engine.url.database or "")
            if not file.exists() or file.stat().st_size == 0:  # connecting would create it
                return FoundDatabase()
        with engine.connect() as connection:
            known_revision(connection)
            if not sa.inspect(connection).has_table(api_keys.name):
                return FoundDatabase()
            is_used = connection.execute(sa.select(api_keys.c.id).limit(1)).first() is not None
            columns = installation.c.id, installation.c.starts, installation.c.cluster
            row = connection.execute(sa.select(*columns)).first()
            return FoundDatabase(is_used, *row) if row else FoundDatabase(is_used)
    except OperationalError as error:
        if "unsupported startup parameter" in str(error.orig):
            raise PoolerInBetween(
                "a pooler refuses our settings of connections to the database"
            ) from None
        raise
    finally:
        engine.dispose()


def row_of(connection: sa.Connection) -> InstallationRow:
    """The row, made again if somebody has emptied the table. Needs a write transaction."""
    row = connection.execute(sa.select(installation)).mappings().first()
    if row is not None:
        return cast("InstallationRow", dict(row))
    connection.execute(sa.insert(installation).values(id=new_id("db")))
    return row_of(connection)


def id_of(connection: sa.Connection) -> str | None:
    """The id; None in a database that no service has started on."""
    return connection.scalar(sa.select(installation.c.id))


def key_check_of(connection: sa.Connection) -> bytes | None:
    """The check value of the master key; None in a database that no service has started on."""
    return connection.scalar(sa.select(installation.c.key_check))


def join_cluster(connection: sa.Connection, key_check: bytes, cluster: str) -> None:
    """Note the cluster that works on the database, and its master key's check value, unless they are known."""
    values = {"key_check": key_check, "cluster": cluster}
    connection.execute(
        sa.update(installation).where(installation.c.cluster.is_(None)).values(**values)
    )


def count_start(connection: sa.Connection, key_check: bytes) -> None:
    """Count one more start, of a service whose master key has this check value."""
    values = {"starts": installation.c.starts + 1, "key_check": key_check}
    connection.execute(sa.update(installation).values(**values))


def set_time(connection: sa.Connection, now: datetime) -> None:
    """Store the current time as the newest, even if a later one is stored."""
    connection.execute(sa.update(installation).values(newest_time=now))


def note_time(connection: sa.Connection, now: datetime) -> None:
    """Store the current time if it is later than the stored one."""
    newest = installation.c.newest_time
    is_newer = newest.is_(None) | (newest < now)
    connection.execute(sa.update(installation).where(is_newer).values(newest_time=now))
