"""A database of an older version is brought to this one with every row it held, or is left as it was."""

import ast
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import event

from tests.conftest import BOTH
from tuneship.store.database import database, tables
from tuneship.store.database.database import (
    HEAD,
    SERVICE_LOCK,
    WORKS_WITH,
    Database,
    DatabaseInUse,
    DatabaseTimeouts,
    sqlite_url,
)
from tuneship.store.records import metric_windows
from tuneship.store.records.metric_windows import HOUR, WindowSource

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FIRST = "0001"
VERSIONS = Path(database.__file__).parents[1] / "migrations" / "versions"


@pytest.fixture(params=BOTH)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Make a database as the first version did, with two rows in every table, and return its URL."""
    if request.param == "sqlite":
        url = sqlite_url(tmp_path / "db.sqlite")
    else:
        cluster = request.getfixturevalue("postgres")
        cluster.run("create database old")
        url = cluster.url("old")
    engine = sa.create_engine(url)
    config = Config()
    config.set_main_option(
        "script_location", str(Path(database.__file__).parents[1] / "migrations")
    )
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, FIRST)
        for table in tables_of(connection):
            connection.execute(sa.insert(table), [row_of(table, number) for number in (1, 2)])
    engine.dispose()
    yield url
    if request.param == "postgres":
        cluster.run("drop database old with (force)")


def tables_of(connection: sa.Connection) -> list[sa.Table]:
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.tables.values() if table.name != "alembic_version"]


def row_of(table: sa.Table, number: int) -> dict[str, Any]:
    return {column.name: value_of(column, number) for column in table.columns}


WINDOW = {"n": 1, "errors": 0, "empty": 0, "ms": 9, "in": 1, "out": 1, "latencies": [[7, 1]]}
"""One second of metrics as the first version kept it. The migration makes windows of every width from it."""


def value_of(column: "sa.Column[Any]", number: int) -> Any:
    if column.name == "window":
        return WINDOW
    kind = column.type
    values: dict[type, Any] = {
        sa.JSON: {"k": number}, sa.Boolean: True, sa.DateTime: NOW, sa.LargeBinary: b"x",
        sa.Integer: number, sa.Float: 0.5,
    }  # fmt: skip
    found = next((value for cls, value in values.items() if isinstance(kind, cls)), None)
    return f"{column.name}-{number}" if found is None else found


def content(connection: sa.Connection, columns: dict[str, list[str]]) -> dict[str, list[str]]:
    found = {table.name: table for table in tables_of(connection)}
    return {
        name: sorted(
            repr(tuple(row))
            for row in connection.execute(sa.select(*(found[name].c[one] for one in names)))
        )
        for name, names in columns.items()
    }


def state_of(url: str, columns: dict[str, list[str]] | None = None) -> tuple[str, Any, Any]:
    """Return the revision, the columns by table, and the rows in them."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        there = {one.name: one.columns.keys() for one in tables_of(connection)}
        revision = connection.exec_driver_sql("select version_num from alembic_version").scalar()
        found = content(connection, columns or there)
    engine.dispose()
    assert revision is not None
    return revision, there, found


def test_every_row_of_an_older_version_is_kept(old: str) -> None:
    revision, columns, before = state_of(old)
    assert revision == FIRST
    assert all(len(found) == 2 for found in before.values())
    opened = Database(old)
    with opened.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, tables.METADATA) == []
        kept = sa.select(tables.metric_windows.c.deployment_id).distinct()
        assert set(connection.scalars(kept)) == {"deployment_id-1", "deployment_id-2"}
        _, hours = metric_windows.facts(connection, WindowSource("deployment_id-1"), HOUR, 0, HOUR)
        assert hours[["requests", "uncounted", "cancelled"]].tolist() == [(1, 1, 0)]
        listed = {row.resource: row.number for row in connection.execute(counts())}
    opened.close()
    del columns["metric_windows"], before["metric_windows"]
    assert state_of(old, columns)[::2] == (HEAD, before)
    assert {"datasets", "jobs", "deployments", "models"} <= set(listed)


def counts() -> "sa.Select[Any]":
    table = tables.resource_counts
    query = sa.select(table.c.resource, sa.func.sum(table.c.number).label("number"))
    return query.group_by(table.c.resource)


def test_a_migration_that_breaks_off_has_changed_nothing(old: str) -> None:
    before = state_of(old)

    def break_off(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        # This statement is the last step of the migration.
        if "DROP TABLE" in statement:
            raise RuntimeError("planted")

    event.listen(sa.Engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(RuntimeError, match="planted"):
            Database(old)
    finally:
        event.remove(sa.Engine, "before_cursor_execute", break_off)
    assert state_of(old) == before
    Database(old).close()
    assert state_of(old)[0] == HEAD


@pytest.mark.parametrize(
    "old", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)
def test_a_database_is_not_changed_under_a_service_of_an_older_version(
    old: str,
) -> None:
    before = state_of(old)
    service = sa.create_engine(old)
    with service.connect() as connection:
        connection.execute(sa.select(sa.func.pg_advisory_lock(SERVICE_LOCK)))
        with pytest.raises(DatabaseInUse):
            Database(old, timeouts=DatabaseTimeouts(claim_s=0.2))
    service.dispose()
    assert state_of(old) == before
    # The server notices the end of a session only later.
    Database(old, timeouts=DatabaseTimeouts(claim_s=120)).close()
    assert state_of(old)[0] == HEAD


def only_adds(migration: Path) -> bool:
    """Whether services of the version before can work beside a migration: it adds what they need not write."""
    for call in ast.walk(ast.parse(migration.read_text())):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("op.")):
            continue
        match ast.unparse(call.func):
            case "op.create_table" | "op.create_index" | "op.f" | "op.get_bind":
                pass
            case "op.add_column":
                added = ast.unparse(call)
                if "nullable=True" not in added and "server_default=" not in added:
                    return False
            case _:
                return False
    return True


def test_no_migration_that_changes_what_is_there_is_said_to_work_with_older_services() -> None:
    changing = [
        file.name[:4]
        for file in VERSIONS.glob("[0-9]*.py")
        if file.name != "0001_the_first_tables.py" and not only_adds(file)
    ]
    assert changing  # e.g. 0008, which writes every metric window again
    assert max(changing) <= WORKS_WITH <= HEAD
