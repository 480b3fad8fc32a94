"""Pages: in order, complete, and with the number of all rows that match."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.listings import DEPLOYMENTS, JOBS

pytestmark = pytest.mark.both_databases

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FILLED: dict[type, Any] = {str: "x", int: 1, bool: True, float: 0.5, bytes: b"x", dict: {}}


def new_row(table: sa.Table, identifier: str, client_id: str, **values: Any) -> dict[str, Any]:
    """Return a row in which every required column has a value."""
    row: dict[str, Any] = {
        "created_at": NOW,
        "updated_at": NOW,
        "id": identifier,
        "client_id": client_id,
    }
    for column in table.columns:
        if column.name not in row and not column.nullable:
            is_json = isinstance(column.type, sa.JSON)
            row[column.name] = {} if is_json else FILLED[column.type.python_type]
    return row | values


def add_jobs(database: Database, count: int) -> list[str]:
    """Add jobs, three at each moment. Return their names, newest first."""
    with database.write() as connection:
        for number in range(count):
            moment = NOW + timedelta(seconds=number // 3)
            rows.insert(
                connection,
                tables.jobs,
                new_row(
                    tables.jobs, f"ft_{number:03}", "alice", created_at=moment, status="queued"
                ),
            )
        rows.insert(connection, tables.jobs, new_row(tables.jobs, "ft_other", "bob"))
    return [f"ft_{number:03}" for number in reversed(range(count))]


@pytest.mark.parametrize("filters", [[], [tables.jobs.c.status == "queued"]])
def test_pages_join_to_the_whole_list_in_order(
    database: Database, filters: list[sa.ColumnElement[bool]]
) -> None:
    order = add_jobs(database, 50)
    found: list[str] = []
    with database.read() as connection:
        offset: int | None = 0
        while offset is not None:
            page = rows.listed(connection, JOBS, "alice", filters, limit=7, offset=offset)
            found += [row["id"] for row in page.rows]
            assert page.total == 50
            offset = page.pagination.next_offset
    assert found == order


def test_a_page_behind_the_end_is_empty_and_knows_the_total(database: Database) -> None:
    add_jobs(database, 3)
    with database.read() as connection:
        page = rows.listed(connection, JOBS, "alice", [], limit=5, offset=2**40)
    assert (page.rows, page.total, page.pagination.next_offset) == ([], 3, None)


def test_a_filtered_page_counts_what_matches(database: Database) -> None:
    order = add_jobs(database, 9)
    with database.write() as connection:
        for identifier in order[1::2]:
            rows.change(connection, tables.jobs, identifier, NOW, status="completed")
        page = rows.listed(
            connection, JOBS, "alice", [tables.jobs.c.status == "completed"], limit=2, offset=0
        )
    assert (page.total, len(page.rows)) == (4, 2)


def test_a_deleted_deployment_leaves_the_list_and_its_count_once(database: Database) -> None:
    with database.write() as connection:
        for number in range(2):
            row = new_row(tables.deployments, f"dep_{number}", "alice", status="running")
            rows.insert(connection, tables.deployments, row)
        for _ in range(2):
            rows.change(connection, tables.deployments, "dep_0", NOW, status="deleted")
        page = rows.listed(connection, DEPLOYMENTS, "alice", [], limit=5, offset=0)
    assert ([row["id"] for row in page.rows], page.total) == (["dep_1"], 1)


def test_every_one_of_many_writers_gets_its_turn(database: Database) -> None:
    def add(number: int) -> None:
        with database.write() as connection:
            rows.insert(connection, tables.jobs, new_row(tables.jobs, f"ft_{number:03}", "alice"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(add, range(200)))
    with database.read() as connection:
        page = rows.listed(connection, JOBS, "alice", [], limit=100, offset=150)
    assert (page.total, len(page.rows)) == (200, 50)
