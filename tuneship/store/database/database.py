"""The database: SQLite by default, Postgres by URL; migrations, and read and write transactions.

Both databases give the same guarantee: one transaction at a time writes the rows of a tenant, so whatever a handler
has checked (quotas, names, versions, sequence numbers) still holds when it writes, and a tenant's events become visible
in the order of their positions. SQLite has one writer for everything (`BEGIN IMMEDIATE`). On Postgres a transaction for
one tenant holds an advisory lock by the tenant's name, and one for all tenants waits until nobody else writes. Before
that, the threads of a service queue among themselves (`write_queue.py`). Readers never wait. Several services work on
one Postgres only as members of a cluster (`claim`), and what only its leader may write is fenced (`leader_lease.py`).

A pooler may stand before Postgres that lends its connections for single transactions (docs/decisions/074). Nothing then
relies on a session, but for the claim and the news, which have connections past it.

SQLite runs with WAL and `synchronous=FULL`, so every change that a client has seen confirmed survives a power failure.
"""

import copy
import logging
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

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
from sqlalchemy.pool import ConnectionPoolEntry

from tuneship.host.startup import StartupError
from tuneship.store.database import tables
from tuneship.store.database.read_cache import ReadCache, SharedReadCache
from tuneship.store.database.write_queue import TurnTimedOut, WriteQueues

MIGRATIONS = Path(__file__).parents[1] / "migrations"
# The newest migration. For a database that has it, Alembic is not loaded.
HEAD = max(file.name[:4] for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))
# The oldest schema whose services can go on when the database has the newest one. A migration that only adds what they
# do not need (nullable columns, columns with a server default, tables, indexes) leaves it as it is; others raise it.
WORKS_WITH = "0001"
SQLITE_FILE = "tuneship.sqlite"
# Exit code if another service holds the database or the data directory.
IN_USE = 6
CONNECT_SECONDS = 5
# How long a connection may get no answer on the network before it is closed.
NETWORK_TIMEOUT_MS = 30_000
# The keys of our advisory locks in a Postgres database. Transactions for one tenant share the lock of the writers; one
# for all tenants has it alone.
WRITER_LOCK, SERVICE_LOCK, CHAIN_LOCK = 0x7475_6E65_0001, 0x7475_6E65_0002, 0x7475_6E65_0003
# The first of the two keys of a tenant's lock. The second is a checksum of the tenant: two tenants that have the same
# one wait for each other, and nothing worse.
TENANT_LOCKS = 0x7475_6E65
# A member of a cluster that stands still inside a transaction is ended after this time, since others wait for it.
IDLE_TIMEOUT_MS = 10_000
POSTGRES_PORT = 5432
# How many connections are kept open, and how many there may be at most: by default more than the service has threads.
KEPT_CONNECTIONS, MOST_CONNECTIONS = 8, 72
# Of urgent work, which has few threads.
URGENT_CONNECTIONS = 8

# Called first in a write transaction; it raises where this process may not write.
Fence = Callable[[sa.Connection], None]

logger = logging.getLogger(__name__)


class DatabaseInUse(StartupError):
    """Another service uses this database."""

    exit_code = IN_USE

    def __init__(self, message: str = "another service runs on this database") -> None:
        super().__init__(message)


class UnknownDatabase(StartupError):
    """The URL does not name a database that the service can use."""


class PoolerInBetween(StartupError):
    """A pooler answers where Postgres itself is needed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: name the server itself in TUNESHIP_DATABASE_LISTEN_URL, beside the pooler in "
            "TUNESHIP_DATABASE_URL (docs/cluster.md)"
        )


class OtherSchema(StartupError):
    """The tables belong to another version of tuneship."""


@dataclass(frozen=True)
class DatabaseTimeouts:
    """How long the database is waited for."""

    # A writer waits so long for the lock before its request is answered with 503.
    lock_ms: int = 30_000
    # Another service may take so long to leave the database. Even on a busy machine Postgres notices within this time
    # that the connections of a killed service are closed.
    claim_s: float = 15.0
    # The first news may take so long, which proves that news is delivered, even on a busy machine.
    news_s: float = 30.0


class Database:
    """Connections to one database with the newest migration."""

    def __init__(
        self,
        url: str,
        *,
        migrates: bool = True,
        timeouts: DatabaseTimeouts = DatabaseTimeouts(),
        is_shared: bool = False,
        listen_url: str | None = None,
        connections: int = MOST_CONNECTIONS,
    ) -> None:
        """Open `url` (a SQLAlchemy URL) and migrate it; without `migrates` it must be up to date already.

        A newer schema that works with this version is left as it is.
        `is_shared`: other members of a cluster work on it, too; Postgres only. They may go on while it is migrated if
        their version works with the new schema.
        `listen_url`: leads to the same database past a pooler, which `url` then may lead through. `connections`: the
        most at the same time, those of urgent work not counted; on Postgres.
        Raises `UnknownDatabase`; `OtherSchema`; `DatabaseInUse` if it must be migrated while a service uses it; and
        `sqlalchemy.exc.OperationalError` if the database does not answer.
        """
        settings = _session_settings(timeouts, IDLE_TIMEOUT_MS if is_shared else None)
        # A pooler gives the next transaction another session: each one then begins with these settings.
        at_start, at_begin = (settings, {}) if listen_url is None else ({}, settings)
        self.engine = engine_of(url, at_start, connections)
        # Urgent transactions have connections of their own, since all others may be in use.
        self._first_engine = engine_of(url, at_start, min(URGENT_CONNECTIONS, connections))
        self.session_engine = self.engine if listen_url is None else engine_of(listen_url)
        self.cache = ReadCache()
        self._listeners: list[tuple[Callable[[], None], str | None]] = []
        self._listeners_beside: list[Callable[[], None]] = []
        self._claimed: sa.Connection | None = None
        self._timeouts = timeouts
        self._fence: Fence | None = None
        self._turns = WriteQueues()
        for engine in (self.engine, self._first_engine):
            if self.is_sqlite:
                event.listen(engine, "connect", _prepare_sqlite(timeouts))
                event.listen(engine, "begin", _begin_sqlite)
            else:
                event.listen(engine, "begin", _begin_postgres(at_begin))
        try:
            revision = self._revision()
            if revision is None or int(revision) < int(HEAD):
                if not migrates:
                    raise OtherSchema(  # noqa: TRY301 - the connections are closed below
                        "the database is not up to date with this version of tuneship: start the service of this "
                        "version once, which brings it up to date"
                    )
                self._migrate(beside_others=is_shared and int(revision or 0) >= int(WORKS_WITH))
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        """Whether this is SQLite, the embedded default."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self, *, first: bool = False) -> Generator[sa.Connection]:
        """A read transaction with one consistent snapshot; `first`: on a connection reserved for urgent work."""
        options: dict[str, Any] = {}
        if not self.is_sqlite:
            # By default every statement in Postgres has a snapshot of its own.
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self._engine_for(first).connect().execution_options(**options) as connection:
            yield connection

    @contextmanager
    def write(
        self, tenant: str | None = None, *, clears: bool = True, first: bool = False
    ) -> Generator[sa.Connection]:
        """A write transaction, committed if the block ends without an exception and rolled back otherwise.

        `tenant`: the client id whose rows it writes; None: rows of several tenants, or of the installation, while
        nobody else may write. On SQLite every transaction is of the second kind.
        `clears`: whether to clear the read cache; writers of metrics and logs need not, as nobody caches those.
        `first`: ahead of all waiting writers of the same rows, on a connection reserved for urgent work.
        Raises SQLAlchemy's errors; `sqlalchemy.exc.TimeoutError` if other writers held these rows for too long.
        """
        # Neither database lets a writer go ahead of others: SQLite polls with growing pauses, and Postgres has a plain
        # queue. Writers in other processes still wait by the rules of the database.
        queue = None if self.is_sqlite else tenant
        try:
            with (
                self._turns.turn(queue, self._timeouts.lock_ms / 1000, first=first),
                self._begun(self._engine_for(first), _locks(tenant)) as connection,
            ):
                yield connection
        except TurnTimedOut:
            raise WaitedTooLong("other writers held the database too long") from None
        finally:
            # A commit that failed may have taken effect, so the cache is cleared after errors, too.
            if clears:
                self.cache.clear()
                self.announce(tenant)

    @contextmanager
    def write_beside(self, *, first: bool = False) -> Generator[sa.Connection]:
        """A short write transaction that does not wait for other writers, if the database allows that, as Postgres
        does.

        It is for rows of no tenant, and for statements that are right whoever writes beside them. Whoever changes
        several rows does so in the order of their keys, so that two such transactions never wait for each other. The
        read cache is not cleared. `first`: as for `write`. Raises as `write` does.
        """
        try:
            if self.is_sqlite:
                with self.write(clears=False, first=first) as connection:
                    yield connection
            else:
                with self._begun(self._engine_for(first), None) as connection:
                    yield connection
        finally:
            for listener in [*self._listeners_beside]:
                listener()

    @contextmanager
    def _begun(self, engine: sa.Engine, locks: str | None) -> Generator[sa.Connection]:
        """A transaction with these locks, behind the fence."""
        options: dict[str, Any] = {"tuneship_write": True, "tuneship_locks": locks}
        with engine.connect().execution_options(**options) as connection, connection.begin():
            if self._fence is not None:
                self._fence(connection)
            yield connection

    def fenced(self, fence: Fence | None) -> "Database":
        """The same database; `fence`, if given, is called first in every writing transaction."""
        fenced = copy.copy(self)
        fenced._fence = fence  # noqa: SLF001 - a copy of this one
        return fenced

    @contextmanager
    def listening(
        self,
        listener: Callable[[], None],
        *,
        tenant: str | None = None,
        beside: Callable[[], None] | None = None,
    ) -> Generator[None]:
        """Call `listener` after each transaction of `write` that clears the cache, on the thread of the writer.

        It must not raise, and must return at once. Like the cache, it hears nothing of `write_beside`: after each of
        those of this process `beside` is called. `tenant`: whose rows are meant; writes for others alone are left out.
        """
        self._listeners.append((listener, tenant))
        if beside is not None:
            self._listeners_beside.append(beside)
        try:
            yield
        finally:
            self._listeners.remove((listener, tenant))
            if beside is not None:
                self._listeners_beside.remove(beside)

    def announce(self, tenant: str | None = None) -> None:
        """Call all who listen, because this process or, in a cluster, another one has written something.

        `tenant`: the only one whose rows have changed.
        """
        for listener, of in [*self._listeners]:
            if tenant is None or of in (None, tenant):
                listener()

    def share_cache(self, publish: Callable[[], None]) -> SharedReadCache:
        """Cache reads as one of several processes from now on; `publish` lets the others know of each write."""
        self.cache = cache = SharedReadCache(publish)
        return cache

    def _engine_for(self, first: bool) -> sa.Engine:
        return self._first_engine if first else self.engine

    def claim(self, *, alone: bool = True) -> None:
        """Become the only service on this database, or one member of its cluster, until `close`.

        For SQLite the lock on the data directory does this. A restarted Postgres has forgotten the claim; it protects
        against starting a second service by mistake, and against migrating under a running service.
        Raises `DatabaseInUse` while another service is there that does not share, and `PoolerInBetween`.
        """
        if self.is_sqlite or self._claimed is not None:
            return
        connection = self.session_engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            self._check_session(connection)
            self._lock_service(connection, alone=alone)
        except BaseException:
            connection.close()
            raise
        self._claimed = connection

    def _check_session(self, connection: sa.Connection) -> None:
        """Prove that this is a session of the database that all others work on. Raises `PoolerInBetween`."""
        # A lock of a session would otherwise stay with a connection of the pooler, whoever gets it next.
        driver: Any = connection.connection.driver_connection
        channel = f"tuneship_{uuid4().hex}"
        driver.execute(f"listen {channel}")
        with self.write_beside() as other:
            timeout = other.execute(sa.text("select current_setting('lock_timeout')")).scalar_one()
            other.execute(sa.select(sa.func.pg_notify(channel, "")))
        if timeout != f"{self._timeouts.lock_ms // 1000}s":
            raise PoolerInBetween("a pooler keeps the settings of connections from the database")
        if not list(driver.notifies(timeout=self._timeouts.news_s, stop_after=1)):
            raise PoolerInBetween(
                "what is notified over one connection to the database is not heard on another"
            )
        driver.execute(f"unlisten {channel}")

    def _lock_service(self, connection: sa.Connection, *, alone: bool) -> None:
        lock = sa.func.pg_try_advisory_lock if alone else sa.func.pg_try_advisory_lock_shared
        query = sa.select(lock(SERVICE_LOCK))
        deadline = time.monotonic() + self._timeouts.claim_s
        while not connection.execute(query).scalar_one():
            if time.monotonic() > deadline:
                raise DatabaseInUse
            time.sleep(0.1)

    def _migrate(self, *, beside_others: bool) -> None:
        """Migrate; unless `beside_others`, while no service uses the database. Raises `DatabaseInUse`."""
        try:
            if not beside_others:
                self.claim()
        except DatabaseInUse:
            if self._revision() == HEAD:  # a service that started earlier has migrated it meanwhile
                return
            raise DatabaseInUse(
                "services of an earlier version run on this database, and cannot continue with the tables of this "
                "version: end them first"
            ) from None
        from alembic import command  # noqa: PLC0415 - only a new or old database needs it
        from alembic.config import Config  # noqa: PLC0415

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        try:
            # In one transaction: a kill in between changes nothing, and a second process waits for the first.
            with self.write() as connection:
                config.attributes["connection"] = connection
                config.attributes["metadata"] = tables.METADATA
                before = revision_of(connection)
                command.upgrade(config, "head")
                noted = sa.text("update alembic_version set works_with = :oldest")
                connection.execute(noted, {"oldest": WORKS_WITH})
        finally:
            self._release()
        if before is not None:
            logger.info("the database was brought from schema %s to %s", before, HEAD)

    def _revision(self) -> str | None:
        with self.engine.connect() as connection:
            return known_revision(connection)

    def _release(self) -> None:
        # Closed for real: a connection that went back to the pool would keep the lock.
        if self._claimed is not None:
            self._claimed.invalidate()
            self._claimed.close()
            self._claimed = None

    def truncate_log(self) -> bool:
        """Empty SQLite's write-ahead log, where deleted rows would stay until they are overwritten.

        Returns whether it was done; while any transaction is open it is not. Postgres does this itself (vacuum).
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
            cursor.execute(f"PRAGMA busy_timeout={self._timeouts.lock_ms}")
            connection.close()

    def check_writable(self) -> None:
        """Make a minimal write that needs disk space. Raises the errors of `write`."""
        with self.write_beside() as connection:
            connection.execute(sa.text("update alembic_version set version_num = version_num"))

    def close(self) -> None:
        """Close every connection; one that a thread still uses is closed when the thread gives it back."""
        self._release()
        for engine in {self.engine, self._first_engine, self.session_engine}:
            # It goes back to the pool that `dispose` leaves behind, which nothing closes any more.
            event.listen(engine, "checkin", _close_late)
            engine.dispose()


def is_away(error: BaseException) -> bool:
    """Whether the database itself failed (it does not answer, is locked, full or damaged), not one statement."""
    if isinstance(error, (DataError, IntegrityError, ProgrammingError)):
        return False
    return isinstance(error, (DBAPIError, WaitedTooLong, PendingRollbackError))


def revision_of(connection: sa.Connection) -> str | None:
    """The migration that the database has; None if it has none of our tables."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("select version_num from alembic_version")).scalar()


def known_revision(connection: sa.Connection) -> str | None:
    """The database's migration. Raises `OtherSchema` if this version of tuneship cannot work with it."""
    revision = revision_of(connection)
    if revision is None:
        return None
    columns = sa.inspect(connection).get_columns("alembic_version")
    # Without this column it was made before the first release, with other migrations under the same numbers.
    if any(column["name"] == "works_with" for column in columns):
        statement = sa.text("select works_with from alembic_version")
        works_with = str(connection.execute(statement).scalar())
        # No schema works with later versions alone, so this holds for those up to `HEAD`, too.
        if works_with.isdecimal() and int(works_with) <= int(HEAD) and revision.isdecimal():
            return revision
    raise OtherSchema(
        f"the database has schema {revision}, which this version of tuneship cannot work with: install the version "
        "that the database was last used with, or a newer one (nothing can upgrade databases from before 26.12.0)"
    )


def url_of(chosen: SecretStr | None, data_dir: Path) -> str:
    """The URL in the settings, or by default that of an SQLite file in the data directory."""
    return chosen.get_secret_value() if chosen else sqlite_url(data_dir / SQLITE_FILE)


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite file."""
    return f"sqlite:///{file}"


def parsed_url(url: str) -> sa.URL:
    """The parts of a SQLAlchemy URL. Raises `UnknownDatabase`, whose message does not repeat it."""
    try:
        return sa.make_url(url)
    except (ArgumentError, ValueError):  # its message holds the URL, and so the password
        raise UnknownDatabase("the database URL is not one that SQLAlchemy reads") from None


def ports_of(url: str) -> set[int]:
    """The ports of the servers that a URL of Postgres names."""
    parsed = parsed_url(url)
    _, options = parsed.get_dialect()().create_connect_args(parsed)
    ports = str(options.get("port", "")).split(",")
    return {int(port or POSTGRES_PORT) for port in ports}


def engine_of(
    url: str, settings: Mapping[str, str] | None = None, connections: int = MOST_CONNECTIONS
) -> sa.Engine:
    """Make an engine, which neither connects nor changes the database yet. Raises `UnknownDatabase`.

    `settings`: of every session in Postgres; None: the usual ones. If it is empty, e.g. behind a pooler, nothing is
    kept in sessions. `connections`: the most at the same time.
    """
    settings = _session_settings(DatabaseTimeouts()) if settings is None else settings
    name = parsed_url(url).get_backend_name()
    if name not in ("sqlite", "postgresql"):
        raise UnknownDatabase("the database URL must begin with sqlite or postgresql+psycopg")
    try:
        return sa.create_engine(
            url,
            pool_pre_ping=name
            != "sqlite",  # replaces connections that a restarted server has closed
            pool_size=min(KEPT_CONNECTIONS, connections),
            max_overflow=max(0, connections - KEPT_CONNECTIONS),
            hide_parameters=True,  # errors, which are logged, must not hold values
            connect_args=_postgres_options(settings) if name == "postgresql" else {},
        )
    except ArgumentError:  # of a driver that nobody knows; its message holds the URL, too
        raise UnknownDatabase("the database URL is not one that SQLAlchemy reads") from None
    except ModuleNotFoundError as error:
        raise UnknownDatabase(
            f"this database needs `pip install 'tuneship[postgres]'` (missing: {error.name})"
        ) from None


def _session_settings(
    timeouts: DatabaseTimeouts, idle_timeout_ms: int | None = None
) -> dict[str, str]:
    """The settings of a session. `idle_timeout_ms`: after it Postgres ends a transaction that does nothing."""
    settings = {"lock_timeout": str(timeouts.lock_ms), "timezone": "UTC"}
    if idle_timeout_ms is not None:
        settings["idle_in_transaction_session_timeout"] = str(idle_timeout_ms)
    return settings


def _postgres_options(settings: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        # Without these two, a connection to a server that was cut off would wait for many minutes.
        "tcp_user_timeout": NETWORK_TIMEOUT_MS,
        "keepalives_idle": NETWORK_TIMEOUT_MS // 1000,
    }
    if settings:
        options["options"] = " ".join(f"-c {name}={value}" for name, value in settings.items())
    else:
        options["prepare_threshold"] = None  # prepared statements belong to a session
    return options


def _prepare_sqlite(timeouts: DatabaseTimeouts) -> Callable[[Any, object], None]:
    def prepare(connection: Any, _record: object) -> None:
        # The driver must not begin transactions: `_begin_sqlite` does.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={timeouts.lock_ms}",
            "foreign_keys=ON",
            "secure_delete=ON",  # destroyed keys must not stay in free pages
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return prepare


def _close_late(_driver_connection: object, record: ConnectionPoolEntry) -> None:
    record.invalidate()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("tuneship_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _begin_postgres(settings: Mapping[str, str]) -> Callable[[sa.Connection], None]:
    """Return a function that begins a transaction: it has these settings until its end, and takes its locks."""
    set_all = [f"set_config('{name}', '{value}', true)" for name, value in settings.items()]

    def begin(connection: sa.Connection) -> None:
        locks = connection.get_execution_options().get("tuneship_locks")
        # Postgres calls them in this order, so the timeout holds for the locks.
        calls = set_all if locks is None else [*set_all, locks]
        if calls:
            connection.exec_driver_sql(f"select {', '.join(calls)}")

    return begin


def _locks(tenant: str | None) -> str:
    """The calls with which a transaction on Postgres takes its locks, in order."""
    if tenant is None:
        return f"pg_advisory_xact_lock({WRITER_LOCK})"
    signed = int.from_bytes(zlib.crc32(tenant.encode()).to_bytes(4), signed=True)
    return (
        f"pg_advisory_xact_lock_shared({WRITER_LOCK}), "
        f"pg_advisory_xact_lock({TENANT_LOCKS}, {signed})"
    )
