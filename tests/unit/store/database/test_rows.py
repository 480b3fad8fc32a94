"""Pages and their counters: in order, complete, and equal to a count after anything that can happen to rows."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuneship.store.database import list_counters as listings
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.list_counters import COUNTED, DEPLOYMENTS, JOBS, Listing

pytestmark = pytest.mark.both_databases

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CLIENTS = ("alice", "bob")
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


def counted(connection: sa.Connection) -> dict[tuple[str, str], int]:
    return {
        (client, listing.name): rows.count(connection, listing.table, *listing.filters(client))
        for client in CLIENTS
        for listing in COUNTED
    }


def kept(connection: sa.Connection) -> dict[tuple[str, str], int]:
    return {
        (client, listing.name): listings.number(connection, listing, client)
        for client in CLIENTS
        for listing in COUNTED
    }


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "delete", "revive", "touch", "remove", "roll back"]),
        st.sampled_from(COUNTED),
        st.sampled_from(CLIENTS),
        st.integers(0, 10**6),
    ),
    max_size=40,
)


@given(steps=STEPS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_anything_that_happens_the_counters_equal_a_count(
    database: Database, steps: Sequence[tuple[str, Listing[Any], str, int]]
) -> None:
    with database.write() as connection:
        for table in {listing.table for listing in COUNTED} | {tables.resource_counts}:
            connection.execute(sa.delete(table))
    for number, (step, listing, client, choice) in enumerate(steps):
        try:
            with database.write() as connection:
                act(connection, step, listing, f"id_{number}", client, choice)
        except InterruptedError:
            pass
        with database.read() as connection:
            assert kept(connection) == counted(connection), step


def act(
    connection: sa.Connection,
    step: str,
    listing: Listing[Any],
    identifier: str,
    client: str,
    choice: int,
) -> None:
    table = listing.table
    if step in ("insert", "roll back"):
        more = {} if listing.kind is None else {"kind": listing.kind}
        rows.insert(connection, table, new_row(table, identifier, client, **more))
        if step == "roll back":
            raise InterruptedError
        return
    there = sorted(connection.scalars(sa.select(table.c.id).where(table.c.client_id == client)))
    one = there[choice % len(there)] if there else "id_nowhere"
    if step == "remove":
        rows.remove(connection, table, one)
    elif step == "touch":
        rows.change(connection, table, one, NOW, tags={"a": "b"})
    elif "status" in table.c:
        status = "deleted" if step == "delete" and listing.is_deleted is not None else "running"
        rows.change(connection, table, one, NOW, status=status)


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


def test_an_unfiltered_page_reads_no_more_rows_in_a_longer_list(database: Database) -> None:
    if not database.is_sqlite:
        pytest.skip("steps of the virtual machine are counted on SQLite")
    steps: list[int] = []
    for more in (100, 900):
        add_more(database, more)
        steps.append(steps_of_a_page(database))
    assert steps[1] <= steps[0] * 1.2


def add_more(database: Database, count: int) -> None:
    with database.write() as connection:
        known = listings.number(connection, JOBS, "alice")
        for number in range(known, known + count):
            row = new_row(tables.jobs, f"ft_{number:05}", "alice", status="completed")
            rows.insert(connection, tables.jobs, row)


def steps_of_a_page(database: Database) -> int:
    """Count the steps that SQLite's machine needs for a page."""
    taken = 0

    def count() -> int:
        nonlocal taken
        taken += 1
        return 0

    with database.read() as connection:
        raw: Any = connection.connection.driver_connection
        raw.set_progress_handler(count, 1)
        page = rows.listed(connection, JOBS, "alice", [], limit=20, offset=0)
        raw.set_progress_handler(None, 0)
    assert len(page.rows) == 20
    return taken


def test_every_one_of_many_writers_gets_its_turn(database: Database) -> None:
    def add(number: int) -> None:
        with database.write() as connection:
            rows.insert(connection, tables.jobs, new_row(tables.jobs, f"ft_{number:03}", "alice"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(add, range(200)))
    with database.read() as connection:
        page = rows.listed(connection, JOBS, "alice", [], limit=100, offset=150)
    assert (page.total, len(page.rows)) == (200, 50)
