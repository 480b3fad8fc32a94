"""The next version brings a database of this one to its schema with every row it held, or leaves it as it was."""

import ast
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.conftest import BOTH
from tests.support.databases.other_versions import NEXT, add_migration
from tuneship.store.database import database
from tuneship.store.database.database import (
    HEAD,
    MIGRATIONS,
    SERVICE_LOCK,
    WORKS_WITH,
    Database,
    DatabaseInUse,
    DatabaseTimeouts,
    sqlite_url,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=BOTH)
def old(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Make a database of this version with two rows in every table, and return its URL to the next version."""
    if request.param == "sqlite":
        url = sqlite_url(tmp_path / "db.sqlite")
    else:
        url = request.getfixturevalue("postgres").blank_database()
    made = Database(url)
    with made.write() as connection:
        for table in tables_of(connection):
            connection.execute(sa.insert(table), [row_of(table, number) for number in (1, 2)])
    made.close()
    shutil.copytree(MIGRATIONS, tmp_path / "migrations")
    add_migration(tmp_path / "migrations")
    monkeypatch.setattr(database, "MIGRATIONS", tmp_path / "migrations")
    monkeypatch.setattr(database, "HEAD", NEXT)
    return url


def tables_of(connection: sa.Connection) -> list[sa.Table]:
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.tables.values() if table.name != "alembic_version"]


def row_of(table: sa.Table, number: int) -> dict[str, Any]:
    return {column.name: value_of(column, number) for column in table.columns}


def value_of(column: "sa.Column[Any]", number: int) -> Any:
    kind = column.type
    values: dict[type, Any] = {
        sa.JSON: {"k": number}, sa.Boolean: True, sa.DateTime: NOW, sa.LargeBinary: bytes([number]),
        sa.Integer: number, sa.Float: 0.5,
    }  # fmt: skip
    found = next((value for cls, value in values.items() if isinstance(kind, cls)), None)
    return f"{column.name}-{number}" if found is None else found


def state_of(url: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Return the revision, and the rows by table."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        revision = connection.exec_driver_sql("select version_num from alembic_version").scalar()
        rows = {
            table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
            for table in tables_of(connection)
        }
    engine.dispose()
    assert revision is not None
    return revision, rows


def test_every_row_of_the_version_before_is_kept(old: str) -> None:
    revision, before = state_of(old)
    assert revision == HEAD
    assert {len(found) for found in before.values()} == {2}
    Database(old).close()
    for row in before["endpoints"]:
        row["note"] = None
    assert state_of(old) == (NEXT, before)


def test_a_migration_that_breaks_off_has_changed_nothing(old: str) -> None:
    before = state_of(old)

    def break_off(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        # This statement follows the migration.
        if "works_with = " in statement:
            raise RuntimeError("planted")

    event.listen(sa.Engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(RuntimeError, match="planted"):
            Database(old)
    finally:
        event.remove(sa.Engine, "before_cursor_execute", break_off)
    assert state_of(old) == before
    Database(old).close()
    assert state_of(old)[0] == NEXT


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
    assert state_of(old)[0] == NEXT


def only_adds(migration: str) -> bool:
    """Whether services of the version before can work beside a migration: it adds what they need not write."""
    for call in ast.walk(ast.parse(migration)):
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
    first, *later = sorted((MIGRATIONS / "versions").glob("[0-9]*.py"))
    changing = [file.name[:4] for file in later if not only_adds(file.read_text())]
    assert max([first.name[:4], *changing]) <= WORKS_WITH <= HEAD
    assert not only_adds("op.drop_column('endpoints', 'note')")
    assert not only_adds("op.add_column('endpoints', sa.Column('note', sa.Text(), nullable=False))")
