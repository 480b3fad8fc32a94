"""The database: SQLite by default, Postgres by URL; read and write transactions. Knows tables, not resources.

Both keep the same promise: one writer at a time, so what a handler has checked still holds when it writes (quotas,
names, versions, the numbers of events), and events become visible in the order of their positions. SQLite says it
with `BEGIN IMMEDIATE`, Postgres with an advisory lock that ends with the transaction; before that, the threads of one
service queue among themselves (`write_queue.py`). Readers wait for nobody.
SQLite runs with WAL and `synchronous=FULL`: what was answered survives power loss.
"""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import SecretStr
from sqlalchemy import event
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    PendingRollbackError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as WaitedTooLong

from tuneship.startup import StartupError
from tuneship.store import tables
from tuneship.store.read_cache import ReadCache
from tuneship.store.write_queue import TurnTimedOut, WriteQueue

# The newest migration. A database that already has it starts without loading Alembic.
HEAD = "0009"
SQLITE_FILE = "tuneship.sqlite"
# Exit code where another service holds the database or the data directory.
IN_USE = 6
# How long a writer waits for the one before it; then the request is answered with 503.
LOCK_PATIENCE_MS = 30_000
CONNECT_SECONDS = 5
# How long the network to a database server may be dead before a connection is given up.
SILENCE_MS = 30_000
# Names of our advisory locks in a Postgres database.
WRITER_LOCK, SERVICE_LOCK = 0x7475_6E65_0001, 0x7475_6E65_0002
# Postgres sees within this time that the connections of a killed service have ended, on a busy
# machine too.
CLAIM_TIMEOUT_S = 15.0


logger = logging.getLogger(__name__)


class DatabaseInUse(StartupError):
    """Another service works on this database."""

    exit_code = IN_USE

    def __init__(self) -> None:
        super().__init__("another service runs on this database")


class UnknownDatabase(StartupError):
    """The URL names no database that the service can use."""


class OtherSchema(StartupError):
    """The tables are those of another version of tuneship."""


class Database:
    """Connections to one database, brought to the newest migration."""

    def __init__(self, url: str, *, migrates: bool = True) -> None:
        """Open `url` (a SQLAlchemy URL) and migrate it; without `migrates` it must be of this version already.

        Raises `UnknownDatabase`, `OtherSchema`, `sqlalchemy.exc.OperationalError` when it does not answer, and
        `DatabaseInUse` when it would have to be migrated while a service of another version works on it.
        """
        self.engine = engine_of(url)
        self._first_engine = engine_of(url)
        """For those who must not wait: all connections of the other may be taken."""
        self.cache = ReadCache()
        self._claimed: sa.Connection | None = None
        self._turns = WriteQueue()
        for engine in (self.engine, self._first_engine):
            if self.is_sqlite:
                event.listen(engine, "connect", _prepare_sqlite)
                event.listen(engine, "begin", _begin_sqlite)
            else:
                event.listen(engine, "begin", _begin_postgres)
        try:
            if self._revision() != HEAD:
                if migrates:
                    self._bring_up()
                else:
                    self._refuse_to_migrate()
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        """Whether this is the embedded default."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self, *, first: bool = False) -> Generator[sa.Connection]:
        """A consistent view; nothing is written. `first`: on a connection that is kept for those who must not wait."""
        options: dict[str, Any] = {}
        if not self.is_sqlite:  # its default gives every statement a view of its own
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self._engine_for(first).connect().execution_options(**options) as connection:
            yield connection

    @contextmanager
    def write(self, *, clears: bool = True, first: bool = False) -> Generator[sa.Connection]:
        """All or nothing; committed when the block ends without an exception.

        `clears`: whether what was read before may differ now; metrics and logs are in tables that nobody keeps.
        `first`: ahead of all who wait to write, on a connection that is kept for it.
        """
        try:
            with (
                self._turn(first=first),
                self._engine_for(first)
                .connect()
                .execution_options(tuneship_write=True) as connection,
                connection.begin(),
            ):
                yield connection
        finally:  # of a commit that failed nobody knows whether it is in force
            if clears:
                self.cache.clear()

    def _engine_for(self, first: bool) -> sa.Engine:
        return self._first_engine if first else self.engine

    @contextmanager
    def _turn(self, *, first: bool) -> Generator[None]:
        """SQLite's own waiting is a sleep that grows, and Postgres has one queue: neither lets anybody go first.

        Writers of other processes still wait by the rules of the database.
        """
        try:
            with self._turns.turn(LOCK_PATIENCE_MS / 1000, first=first):
                yield
        except TurnTimedOut:
            raise WaitedTooLong("other writers held the database too long") from None

    def claim(self) -> None:
        """Be the only service on this database until `close`. Raises `DatabaseInUse`.

        For SQLite the lock on the data directory says it. A Postgres that was restarted has forgotten the claim: it
        guards against a second service by mistake, at its start, and against a change under a running one.
        """
        if self.is_sqlite or self._claimed is not None:
            return
        connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        query = sa.select(sa.func.pg_try_advisory_lock(SERVICE_LOCK))
        end = time.monotonic() + CLAIM_TIMEOUT_S
        while not connection.execute(query).scalar_one():
            if time.monotonic() > end:
                connection.close()
                raise DatabaseInUse
            time.sleep(0.1)
        self._claimed = connection

    def _refuse_to_migrate(self) -> None:
        raise OtherSchema(
            "the database is not up to date with this version of tuneship: start the service of this "
            "version once, which brings it up to date"
        )

    def _bring_up(self) -> None:
        """Only while no service works on it; one that came first may have done it meanwhile."""
        try:
            self.claim()
        except DatabaseInUse:
            if self._revision() == HEAD:
                return
            raise
        try:
            self._migrate()
        finally:
            self._release()

    def _revision(self) -> str | None:
        with self.engine.connect() as connection:
            revision = revision_of(connection)
        check_revision(revision)
        return revision

    def _migrate(self) -> None:
        """In one transaction: killed half-way it has changed nothing, and a second process waits for the first."""
        from alembic import command  # noqa: PLC0415 - only a new or old database needs it
        from alembic.config import Config  # noqa: PLC0415

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        with self.write() as connection:
            config.attributes["connection"] = connection
            config.attributes["metadata"] = tables.METADATA
            before = revision_of(connection)
            command.upgrade(config, "head")
        if before is not None:
            logger.info("the database was brought from schema %s to %s", before, HEAD)

    def _release(self) -> None:
        """A connection that goes back to the pool would keep the claim."""
        if self._claimed is not None:
            self._claimed.invalidate()
            self._claimed.close()
            self._claimed = None

    def truncate_log(self) -> bool:
        """Leave nothing of deleted rows in SQLite's log, where they would stay until others took their place.

        Answers whether it is done: while a transaction is open nothing happens. Postgres does it by itself (vacuum).
        """
        if not self.is_sqlite:
            return True
        connection = self.engine.raw_connection()
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA busy_timeout=0")
            busy, *_ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not busy
        finally:
            cursor.execute(f"PRAGMA busy_timeout={LOCK_PATIENCE_MS}")
            connection.close()

    def close(self) -> None:
        """Close every connection."""
        self._release()
        self.engine.dispose()
        self._first_engine.dispose()


def is_away(error: BaseException) -> bool:
    """Whether the database failed (it does not answer, is locked, full or damaged), not what was asked of it."""
    if isinstance(error, (DataError, IntegrityError, ProgrammingError)):
        return False
    return isinstance(error, (DBAPIError, WaitedTooLong, PendingRollbackError))


def revision_of(connection: sa.Connection) -> str | None:
    """The migration that the tables come from; None in a database without our tables."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("select version_num from alembic_version")).scalar()


def check_revision(revision: str | None) -> None:
    """Raises `OtherSchema` for a revision that this version of tuneship does not know."""
    if revision is not None and not (revision.isdecimal() and int(revision) <= int(HEAD)):
        raise OtherSchema(
            f"the database has schema {revision}, and this version of tuneship knows schemas up to "
            f"{HEAD}: install the version that the database was last used with, or a newer one"
        )


def url_of(chosen: SecretStr | None, data_dir: Path) -> str:
    """The URL that the settings name; by default an SQLite file in the data directory."""
    return chosen.get_secret_value() if chosen else sqlite_url(data_dir / SQLITE_FILE)


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite file."""
    return f"sqlite:///{file}"


def engine_of(url: str) -> sa.Engine:
    """Connections only: to look at a database without changing it. Raises `UnknownDatabase`."""
    try:
        name = sa.make_url(url).get_backend_name()
        if name not in ("sqlite", "postgresql"):
            raise UnknownDatabase("the database URL must begin with sqlite or postgresql+psycopg")
        return sa.create_engine(
            url,
            pool_pre_ping=name != "sqlite",  # a restarted server is noticed before a request is
            pool_size=8,
            max_overflow=64,  # more than the service has threads
            hide_parameters=True,  # an error must not carry values into the log
            connect_args={} if name == "sqlite" else _postgres_options(),
        )
    except ArgumentError:  # its message holds the URL, and that the password
        raise UnknownDatabase("the database URL is not one that SQLAlchemy reads") from None
    except ModuleNotFoundError as error:
        raise UnknownDatabase(
            f"this database needs `pip install 'tuneship[postgres]'` (missing: {error.name})"
        ) from None


def _postgres_options() -> dict[str, Any]:
    return {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": SILENCE_MS,  # a server that is cut off without a word is not waited for
        "keepalives_idle": SILENCE_MS // 1000,
        "options": f"-c lock_timeout={LOCK_PATIENCE_MS} -c timezone=UTC",
    }


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        f"busy_timeout={LOCK_PATIENCE_MS}",
        "foreign_keys=ON",
        "secure_delete=ON",  # a key that was destroyed is not left in a free page
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("tuneship_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _begin_postgres(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("tuneship_write", False):
        connection.exec_driver_sql(f"select pg_advisory_xact_lock({WRITER_LOCK})")
