"""The database: SQLite by default, Postgres by URL; read and write transactions. Knows tables, not resources.

SQLite runs with WAL and `synchronous=FULL` (what was answered survives power loss), and every write transaction is
`BEGIN IMMEDIATE`: two writers wait for each other instead of failing half-way.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from tuneship.store import tables

HEAD = "0001"
"""The newest migration. A database that already has it starts without loading Alembic."""


class Database:
    """Connections to one database, brought to the newest migration."""

    def __init__(self, url: str) -> None:
        """Open `url` (a SQLAlchemy URL) and migrate it."""
        self.engine = sa.create_engine(
            url,
            pool_pre_ping=not url.startswith("sqlite"),
            pool_size=8,
            max_overflow=40,  # more than the service has threads
            hide_parameters=True,  # an error must not carry values into the log
        )
        if self.is_sqlite:
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        if self._revision() != HEAD:
            _migrate(self.engine)

    @property
    def is_sqlite(self) -> bool:
        """Whether this is the embedded default."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Generator[sa.Connection]:
        """A consistent view; nothing is written."""
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Generator[sa.Connection]:
        """All or nothing; committed when the block ends without an exception."""
        with (
            self.engine.connect().execution_options(tuneship_write=True) as connection,
            connection.begin(),
        ):
            yield connection

    def _revision(self) -> str | None:
        with self.engine.connect() as connection:
            if not sa.inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(sa.text("select version_num from alembic_version")).scalar()

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite file."""
    return f"sqlite:///{file}"


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "busy_timeout=30000",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("tuneship_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(engine: sa.Engine) -> None:
    from alembic import command  # noqa: PLC0415 - only a new or old database needs it
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.connect().execution_options(tuneship_write=True) as connection:
        config.attributes["connection"] = connection
        config.attributes["metadata"] = tables.METADATA
        command.upgrade(config, "head")
