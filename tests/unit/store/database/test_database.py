"""Both databases give the same guarantees: atomic transactions, one writer, snapshots, and recovery from outages."""

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.exc import InternalError, OperationalError

from tests.support.databases.postgres_cluster import Cluster
from tuneship.store.database import rows, tables
from tuneship.store.database.database import (
    Database,
    DatabaseInUse,
    DatabaseTimeouts,
    UnknownDatabase,
    ports_of,
    sqlite_url,
)
from tuneship.store.records import job_records
from tuneship.store.records.outbox import emit

pytestmark = pytest.mark.both_databases

NOW = datetime(2026, 7, 1, 12, 30, 0, 250_000, tzinfo=UTC)
SUBJECT = {"id": "ft_1", "client_id": "alice"}


def sequences(database: Database) -> list[int]:
    with database.read() as connection:
        query = sa.select(tables.events.c.sequence).order_by(tables.events.c.position)
        return list(connection.scalars(query))


def test_the_migrations_make_exactly_the_tables(database: Database) -> None:
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, tables.METADATA) == []


def test_a_migrated_database_is_opened_as_it_is(database: Database) -> None:
    with database.write() as connection:
        emit(connection, "dataset.uploaded", SUBJECT, NOW)
    again = Database(database.engine.url.render_as_string(hide_password=False))
    assert sequences(again) == [1]
    again.close()


def test_a_moment_comes_back_as_it_was_in_any_time_zone(database: Database) -> None:
    with database.write() as connection:
        if not database.is_sqlite:
            connection.exec_driver_sql("set time zone 'Asia/Tokyo'")
        job_records.add_log(connection, "ft_1", NOW, "info", "m")
        found = job_records.logs_of(connection, "ft_1", after=0, limit=1)[0]["timestamp"]
    assert (found, found.utcoffset()) == (NOW, UTC.utcoffset(None))


def test_a_writers_check_holds_until_it_ends(database: Database) -> None:
    """Every thread takes the last number and adds one. With two writers at once, numbers would occur twice."""

    def add() -> None:
        for _ in range(8):
            with database.write() as connection:
                emit(connection, "dataset.uploaded", SUBJECT, NOW)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sequences(database) == list(range(1, 65))


def test_a_reader_keeps_its_view_and_waits_for_no_writer(database: Database) -> None:
    with database.write() as writer:
        job_records.add_log(writer, "ft_1", NOW, "info", "m")
        with database.read() as reader:
            before = rows.count(reader, tables.job_logs)
            with database.read() as other:
                assert rows.count(other, tables.job_logs) == 0
            job_records.add_log(writer, "ft_1", NOW, "info", "m")
            writer.commit()
            assert (before, rows.count(reader, tables.job_logs)) == (0, 0)
    with database.read() as reader:
        assert rows.count(reader, tables.job_logs) == 2


def test_a_connection_in_use_at_the_close_is_closed_when_it_comes_back(database: Database) -> None:
    with database.read() as connection:
        driver = connection.connection.driver_connection
        database.close()
        assert connection.scalar(sa.text("select 1")) == 1

    with pytest.raises(Exception, match="closed"):
        driver.execute("select 1")


def test_a_write_that_fails_leaves_nothing(database: Database) -> None:
    def write_and_fail() -> None:
        with database.write() as connection:
            job_records.add_log(connection, "ft_1", NOW, "info", "m")
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        write_and_fail()
    with database.read() as connection:
        assert rows.count(connection, tables.job_logs) == 0


@pytest.mark.parametrize(
    "key", ["team", 'a"b', "a'b", "a.b", "a b", "$", "0", "ä", "%s", ":x", "\\"]
)
def test_a_tag_is_found_by_any_key(database: Database, key: str) -> None:
    table = tables.datasets
    with database.write() as connection:
        for number, tags in enumerate(({key: "yes"}, {key: "no"}, {}, {"other": "yes"})):
            blank: dict[str, Any] = {
                column.name: "" for column in table.columns if isinstance(column.type, sa.Text)
            }
            row = blank | {"id": str(number), "tags": tags, "created_at": NOW, "updated_at": NOW}
            connection.execute(sa.insert(table).values(**row))
        query = sa.select(table.c.id).where(*rows.filters_of(table, {key: "yes"}))
        assert list(connection.scalars(query)) == ["0"]


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:secret@host/d",
        "no url",
        "postgresql+nodriver://u:secret@h/d",
        "postgresql+psycopg://u:secret@a:1,b:2/d",
    ],
)
def test_a_url_of_another_database_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(UnknownDatabase) as refused:
        Database(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("servers", "ports"),
    [
        ("h", {5432}),
        ("h:7", {7}),
        ("?host=a,b", {5432}),
        ("?host=a,b&port=1,2", {1, 2}),
        ("?host=a:1&host=b:2&target_session_attrs=read-write", {1, 2}),
    ],
)
def test_the_ports_of_all_servers_of_a_url_are_known(servers: str, ports: set[int]) -> None:
    host, mark, query = servers.partition("?")
    assert ports_of(f"postgresql+psycopg://u:p@{host}/d{mark}{query}") == ports


def test_sqlite_survives_power_loss_and_waits_for_other_writers(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "db.sqlite"))
    with database.read() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    database.close()
    assert found == {
        "journal_mode": "wal", "synchronous": 2, "busy_timeout": 30000, "foreign_keys": 1,
    }  # fmt: skip


@pytest.mark.postgres
def test_a_view_of_postgres_cannot_write(postgres: Cluster) -> None:
    database = Database(postgres.new_database())
    with pytest.raises(InternalError, match="read-only"), database.read() as connection:
        job_records.add_log(connection, "ft_1", NOW, "info", "m")
    database.close()


@pytest.mark.postgres
def test_a_postgres_that_was_away_is_used_again(postgres: Cluster) -> None:
    url = postgres.new_database()
    database = Database(url)
    with database.write() as connection:
        job_records.add_log(connection, "ft_1", NOW, "info", "m")
    postgres.refuse(url, refuses=True)
    with pytest.raises(OperationalError), database.read() as connection:
        rows.count(connection, tables.job_logs)
    postgres.refuse(url, refuses=False)
    with database.read() as connection:
        assert rows.count(connection, tables.job_logs) == 1
    database.close()


@pytest.mark.postgres
def test_a_postgres_has_one_service(postgres: Cluster) -> None:
    url = postgres.new_database()
    first, hasty = Database(url), Database(url, timeouts=DatabaseTimeouts(claim_s=0.2))
    first.claim()
    with pytest.raises(DatabaseInUse):
        hasty.claim()
    hasty.close()
    first.close()
    # The server notices the end of a connection only later.
    second = Database(url, timeouts=DatabaseTimeouts(claim_s=120))
    second.claim()
    second.close()


@pytest.mark.postgres
def test_two_processes_may_migrate_a_postgres_at_once(
    postgres: Cluster,
) -> None:
    postgres.run("create database empty")
    opened: list[Database] = []

    def open_it() -> None:
        opened.append(Database(postgres.url("empty"), timeouts=DatabaseTimeouts(claim_s=120)))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for database in opened:
        assert sequences(database) == []
        database.close()
    assert len(opened) == 4
