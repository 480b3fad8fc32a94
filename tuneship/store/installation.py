"""The one row that says which installation a database belongs to: its id, its starts, its master key, its newest time.

`Found` is what a look at a database shows before anything in it is changed: a service that is pointed at the wrong
database, or at an empty one, must find out before it makes a table.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa

from tuneship.store.database import check_revision, engine_of, revision_of
from tuneship.store.identifiers import new_id
from tuneship.store.queries import Row
from tuneship.store.tables import api_keys, installation


@dataclass(frozen=True)
class FoundDatabase:
    """A database as it was found."""

    is_used: bool = False
    """Whether a service has worked on it: each makes an API key at its first start."""
    id: str | None = None
    """None in a database that is new or of an earlier version."""
    starts: int = 0


def look(url: str) -> FoundDatabase:
    """What is in a database, without changing or creating it. Raises `UnknownDatabase`, `OtherSchema`, SQLAlchemy's."""
    engine = engine_of(url)
    try:
        if engine.dialect.name == "sqlite":
            file = Path(engine.url.database or "")
            if not file.exists() or file.stat().st_size == 0:  # connecting would make it
                return FoundDatabase()
        with engine.connect() as connection:
            check_revision(revision_of(connection))
            return _found(connection)
    finally:
        engine.dispose()


def _found(connection: sa.Connection) -> FoundDatabase:
    inspector = sa.inspect(connection)
    if not inspector.has_table(api_keys.name):
        return FoundDatabase()
    is_used = connection.execute(sa.select(api_keys.c.id).limit(1)).first() is not None
    if not inspector.has_table(installation.name):
        return FoundDatabase(is_used)
    row = connection.execute(sa.select(installation.c.id, installation.c.starts)).first()
    return FoundDatabase(is_used) if row is None else FoundDatabase(is_used, row.id, row.starts)


def row_of(connection: sa.Connection) -> Row:
    """The row; it is made where somebody has emptied the table. Needs a transaction for writing."""
    row = connection.execute(sa.select(installation)).mappings().first()
    if row is not None:
        return dict(row)
    connection.execute(sa.insert(installation).values(id=new_id("db")))
    return row_of(connection)


def count_start(connection: sa.Connection, key_check: bytes) -> None:
    """Write down that a service with this master key has started once more."""
    values = {"starts": installation.c.starts + 1, "key_check": key_check}
    connection.execute(sa.update(installation).values(**values))


def set_time(connection: sa.Connection, now: datetime) -> None:
    """Take the current time for the newest, also where a later one was known."""
    connection.execute(sa.update(installation).values(newest_time=now))


def note_time(connection: sa.Connection, now: datetime) -> None:
    """Keep the newest time that the service has seen."""
    newest = installation.c.newest_time
    is_newer = newest.is_(None) | (newest < now)
    connection.execute(sa.update(installation).where(is_newer).values(newest_time=now))
