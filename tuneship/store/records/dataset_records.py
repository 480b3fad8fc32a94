"""The rows of datasets, and the bytes of all files. `tuneship/service/datasets/` decides who may do what."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.datasets import DatasetStatus
from tuneship.store.database.tables import batch_files, datasets, models


def bytes_of(connection: sa.Connection, client_id: str) -> int:
    """The bytes of a client's datasets, files of batches and imported models together."""
    queries = (
        sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(
            column.table.c.client_id == client_id
        )
        for column in (datasets.c.bytes, batch_files.c.bytes, models.c.imported_bytes)
    )
    return sum(int(connection.scalar(query) or 0) for query in queries)


def to_process(connection: sa.Connection) -> dict[str, str]:
    """The clients of unread datasets, by the id of the dataset, oldest first."""
    query = sa.select(datasets.c.id, datasets.c.client_id)
    query = query.where(datasets.c.status == DatasetStatus.PROCESSING)
    found = connection.execute(query.order_by(datasets.c.created_at, datasets.c.id))
    return {row.id: row.client_id for row in found}


def end_processing(
    connection: sa.Connection, dataset_id: str, now: datetime, values: dict[str, Any]
) -> bool:
    """Write the outcome; return whether the dataset still waited for it (False if it was deleted meanwhile)."""
    is_waiting = (datasets.c.id == dataset_id) & (datasets.c.status == DatasetStatus.PROCESSING)
    change = sa.update(datasets).where(is_waiting).values(updated_at=now, **values)
    return connection.execute(change).rowcount == 1
