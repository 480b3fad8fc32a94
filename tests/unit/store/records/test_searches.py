"""Frequent queries, and those that run while writers wait, use an index, as SQLite's query plan shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.support.databases.sqlite_files import new_sqlite
from tests.unit.store.records.test_job_records import add_curve
from tests.unit.store.records.test_store import add_job
from tuneship.contract.jobs import JobStatus
from tuneship.store.database.database import Database
from tuneship.store.database.tables import METADATA
from tuneship.store.records import (
    endpoint_records,
    idempotency,
    job_queue,
    job_records,
    outbox,
    webhook_records,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SEARCHES: dict[str, Callable[[sa.Connection], Any]] = {
    "the queue": lambda connection: job_queue.queue_order(connection, NOW),
    "the first in line": lambda connection: job_queue.first_in_line(connection, NOW),
    "lapsed leases": lambda connection: endpoint_records.lapsed(connection, NOW),
    "a tenant's lapsed leases": lambda connection: endpoint_records.revert_lapsed(
        connection, "alice", NOW
    ),
    "old events": lambda connection: outbox.forget(connection, NOW),
    "old idempotency keys": lambda connection: idempotency.forget(connection, NOW),
    "a dataset's jobs": lambda connection: job_records.is_dataset_needed(connection, "ds_1"),
    "due deliveries": lambda connection: webhook_records.webhooks_with_due(connection, NOW),
}
# Tables of which no query may read every row. The other two are small, or read once an hour without repetition.
GROWING = METADATA.tables.keys() - {"webhooks", "events"}


@contextmanager
def statements(connection: sa.Connection) -> Iterator[list[tuple[str, Any]]]:
    found: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, values: Any, *___: object) -> None:
        found.append((statement, values))

    event.listen(connection, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(connection, "before_cursor_execute", note)


@pytest.mark.parametrize("name", SEARCHES)
def test_no_table_that_grows_is_read_from_end_to_end(name: str, tmp_path: Any) -> None:
    opened = Database(new_sqlite(tmp_path / "db.sqlite"))
    with opened.write() as connection:
        with statements(connection) as found:
            SEARCHES[name](connection)
        assert found
        plans = [
            row.detail
            for statement, values in found
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
        ]
    opened.close()
    scanned = {plan.split()[1] for plan in plans if plan.startswith("SCAN")}
    assert not scanned & GROWING, plans


def steps_of(database: Database, search: Callable[[sa.Connection], Any]) -> int:
    """Count how many thousand steps SQLite's machine needs."""
    taken: list[None] = []
    with database.read() as connection:
        # The first run compiles the statements.
        search(connection)
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: taken.append(None), 1000)
        search(connection)
        driver.set_progress_handler(None, 1000)
    return len(taken)


@pytest.mark.parametrize("measured_every", [1, 200_000])
def test_four_times_the_steps_are_less_than_twice_the_work_for_a_curve(
    tmp_path: Any, measured_every: int
) -> None:
    """The cost grows with the steps that are kept, not with those that are left out."""
    taken: list[int] = []
    for steps in (8_000, 32_000):
        opened = Database(new_sqlite(tmp_path / f"{steps}.sqlite"))
        with opened.write() as connection:
            add_curve(connection, steps, measured_every=measured_every)
        for only in (True, False):
            look = partial(job_records.curve_of, job_id="ft_1", evaluated_only=only)
            taken.append(steps_of(opened, look))
        opened.close()
    few, many = taken[:2], taken[2:]
    assert all(more < 2 * less + 1 for less, more in zip(few, many, strict=True)), taken


def test_the_next_job_is_found_without_reading_what_its_tenant_has_had(tmp_path: Any) -> None:
    opened = Database(new_sqlite(tmp_path / "db.sqlite"))
    add_job(opened, "ft_next")
    before = steps_of(opened, SEARCHES["the queue"])
    for number in range(1000):
        add_job(opened, f"ft_{number}", status=JobStatus.COMPLETED, started_at=NOW)
    assert steps_of(opened, SEARCHES["the queue"]) <= before + 1
    opened.close()
