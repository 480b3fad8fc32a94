"""The rows of datasets. Who may do what with a dataset is decided in `tuneship/service/datasets/`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.datasets import DatasetStatus
from tuneship.store.tables import datasets


def usage_of(connection: sa.Connection, client_id: str) -> tuple[int, int]:
    """The number of a client's datasets, and their bytes together."""
    size = sa.func.coalesce(sa.func.sum(datasets.c.bytes), 0)
    query = sa.select(sa.func.count(), size).where(datasets.c.client_id == client_id)
    number, total = connection.execute(query).one()
    return number, int(total)


def ids_to_process(connection: sa.Connection) -> Sequence[str]:
    """The datasets of all clients whose file is still to be read, oldest first."""
    query = sa.select(datasets.c.id).where(datasets.c.status == DatasetStatus.PROCESSING)
    return connection.scalars(query.order_by(datasets.c.created_at, datasets.c.id)).all()


def end_processing(
    connection: sa.Connection, dataset_id: str, now: datetime, values: dict[str, Any]
) -> bool:
    """Write the outcome; returns whether the dataset still waited for it, so False if it was deleted meanwhile."""
    is_waiting = (datasets.c.id == dataset_id) & (datasets.c.status == DatasetStatus.PROCESSING)
    change = sa.update(datasets).where(is_waiting).values(updated_at=now, **values)
    return connection.execute(change).rowcount == 1
