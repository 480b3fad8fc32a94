"""The rows of batches and of their files. Who answers the requests: `tuneship/service/batches/`.

A batch's stored answers are counted by `completed` and `failed`. Every change while it runs names the number that it
goes on from, so that no answer is stored twice, whoever else may work on the batch.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.openai.batches import OPEN, BatchStatus
from tuneship.store.database.rows import fetch_all
from tuneship.store.database.tables import BatchFileRow, BatchRow, batch_files, batches

# Purposes of files: what a client has uploaded, what a batch has made of it, and parts of that while the batch runs.
INPUT, OUTPUT = "batch", "batch_output"
# Rows of an eval, which runs copy.
EVAL_ROWS = "evals"
ANSWERS_PART, ERRORS_PART = "answers_part", "errors_part"
PARTS = (ANSWERS_PART, ERRORS_PART)
RUNNING = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


def open_batches(connection: sa.Connection) -> Sequence[BatchRow]:
    """The batches of all clients that have not ended, oldest first."""
    query = sa.select(batches).where(batches.c.status.in_(OPEN))
    return fetch_all(connection, query.order_by(batches.c.created_at, batches.c.id))


def move(
    connection: sa.Connection,
    batch_id: str,
    before: Collection[BatchStatus],
    now: datetime,
    **values: Any,
) -> bool:
    """Change a batch that is in one of these states; returns whether it was."""
    is_there = (batches.c.id == batch_id) & batches.c.status.in_(before)
    change = sa.update(batches).where(is_there).values(updated_at=now, **values)
    return connection.execute(change).rowcount == 1


def advance(
    connection: sa.Connection, row: BatchRow, now: datetime, changes: dict[str, Any]
) -> bool:
    """Count the answers after those of `row`; return False if another process has counted some."""
    change = (
        sa.update(batches)
        .where(
            batches.c.id == row["id"],
            batches.c.status.in_(RUNNING),
            batches.c.completed == row["completed"],
            batches.c.failed == row["failed"],
        )
        .values(updated_at=now, **changes)
    )
    return connection.execute(change).rowcount == 1


def parts_of(connection: sa.Connection, batch_id: str) -> Sequence[BatchFileRow]:
    """The parts that a batch has stored, in the order of its requests."""
    query = sa.select(batch_files).where(
        batch_files.c.batch_id == batch_id, batch_files.c.purpose.in_(PARTS)
    )
    return fetch_all(connection, query.order_by(batch_files.c.position))


def bytes_of_parts(connection: sa.Connection, batch_id: str) -> int:
    """The bytes that a batch has stored so far."""
    query = sa.select(sa.func.coalesce(sa.func.sum(batch_files.c.bytes), 0)).where(
        batch_files.c.batch_id == batch_id, batch_files.c.purpose.in_(PARTS)
    )
    return int(connection.scalar(query) or 0)


def remove_parts(connection: sa.Connection, batch_id: str) -> None:
    """Remove all rows of a batch's parts at once: there may be hundreds, and no list counts them."""
    connection.execute(
        sa.delete(batch_files).where(
            batch_files.c.batch_id == batch_id, batch_files.c.purpose.in_(PARTS)
        )
    )


def is_input_needed(connection: sa.Connection, file_id: str) -> bool:
    """Whether a batch that has not ended reads the file."""
    needs = sa.select(batches.c.id).where(
        batches.c.input_file_id == file_id, batches.c.status.in_(OPEN)
    )
    return connection.execute(needs.limit(1)).first() is not None
