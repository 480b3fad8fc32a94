"""The outbox: one event row in the transaction of each change of state. Delivery by webhook reads it later."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.identifiers import new_id
from tuneship.store.tables import events


def emit(
    connection: sa.Connection, kind: str, resource: dict[str, Any], now: datetime, **data: Any
) -> None:
    """Add an event of `kind` (§6) about a resource row (`id`, `client_id`); sequences have no gaps."""
    last = sa.select(sa.func.coalesce(sa.func.max(events.c.sequence), 0)).where(
        events.c.resource_id == resource["id"]
    )
    connection.execute(
        sa.insert(events).values(
            id=new_id("evt"),
            client_id=resource["client_id"],
            type=kind,
            resource_id=resource["id"],
            sequence=connection.execute(last).scalar_one() + 1,
            created_at=now,
            data=data,
        )
    )
