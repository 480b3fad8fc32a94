"""The rows of wrapped data keys. `tuneship/service/access/data_keys.py` wraps and opens them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.database.tables import object_keys


def wrapped_keys(connection: sa.Connection, *object_ids: str) -> dict[str, bytes]:
    """The wrapped keys of these objects; objects without a key are missing."""
    query = sa.select(object_keys.c.object_id, object_keys.c.wrapped)
    found = connection.execute(query.where(object_keys.c.object_id.in_(object_ids)))
    return {row.object_id: row.wrapped for row in found}


def all_of(connection: sa.Connection) -> Sequence["sa.Row[Any]"]:
    """The keys of all objects and tenants."""
    return connection.execute(sa.select(object_keys)).all()


def add(
    connection: sa.Connection, client_id: str, object_id: str, wrapped: bytes, now: datetime
) -> None:
    """Insert a wrapped key."""
    values = {
        "object_id": object_id,
        "client_id": client_id,
        "wrapped": wrapped,
        "created_at": now,
    }
    connection.execute(sa.insert(object_keys).values(values))


def remove(connection: sa.Connection, object_ids: Sequence[str]) -> None:
    """Delete the keys of objects."""
    connection.execute(sa.delete(object_keys).where(object_keys.c.object_id.in_(object_ids)))
