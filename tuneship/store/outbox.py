"""The outbox: one event row in the transaction of each change of state, and one delivery for every webhook that asked.

Both commit with the change or not at all, so nothing is lost when the process dies between a change and its sending.
One writer works at a time (`database.py`): a resource's sequence has no gaps, and positions appear in their order.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.events import EventKind, covers
from tuneship.contract.webhooks import DeliveryStatus
from tuneship.store.identifiers import new_id
from tuneship.store.queries import Row
from tuneship.store.tables import deliveries, events, webhooks

KEPT = timedelta(days=30)
# Characters of one value: an event stays far below 20 kB.
LONGEST_TEXT = 500
# Texts that are words of the service; a resource in hipaa mode tells nothing else but numbers.
PLAIN_WORDS = frozenset({"status", "from", "to", "reason", "code"})


def emit(connection: sa.Connection, kind: str, resource: Row, now: datetime, **data: Any) -> None:
    """Add an event of `kind` (§6) about a resource row (`id`, `client_id`, `status`), for everyone who asked.

    `data`: a summary in numbers, ids and the service's own words. Raises `ValueError` for a kind that is none.
    """
    kind = EventKind(kind)
    data.setdefault("status", resource.get("status"))
    row = {"client_id": resource["client_id"], "resource_id": resource["id"], "type": kind}
    identifier = add(connection, row, now, _told(resource, data))
    query = sa.select(webhooks.c.id, webhooks.c.events).where(
        webhooks.c.client_id == resource["client_id"], webhooks.c.active
    )
    for webhook in connection.execute(query).all():
        if covers(webhook.events, kind):
            address(connection, webhook.id, identifier, now)


def _told(resource: Row, data: Mapping[str, Any]) -> dict[str, Any]:
    """What may leave: everything in the service's own words; in hipaa mode those few that are never free text."""
    settings: Mapping[str, Any] = resource.get("security_settings") or {}
    if settings.get("compliance_mode") == "hipaa":
        data = {
            name: value
            for name, value in data.items()
            if name in PLAIN_WORDS or value is None or isinstance(value, int | float)
        }
    return {
        name: value[:LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in data.items()
    }


def add(connection: sa.Connection, row: Row, now: datetime, data: dict[str, Any]) -> str:
    """Store an event (`client_id`, `resource_id`, `type`) under its resource's next number; answers its id."""
    last = sa.select(sa.func.coalesce(sa.func.max(events.c.sequence), 0)).where(
        events.c.resource_id == row["resource_id"]
    )
    identifier, sequence = new_id("evt"), connection.execute(last).scalar_one() + 1
    connection.execute(
        sa.insert(events).values(**row, id=identifier, sequence=sequence, created_at=now, data=data)
    )
    return identifier


def address(connection: sa.Connection, webhook_id: str, event_id: str, now: datetime) -> None:
    """Queue an event for one webhook."""
    connection.execute(
        sa.insert(deliveries).values(
            webhook_id=webhook_id,
            event_id=event_id,
            status=DeliveryStatus.PENDING,
            attempts=0,
            created_at=now,
            updated_at=now,
            next_attempt_at=now,
        )
    )


def events_of(
    connection: sa.Connection, client_id: str, now: datetime, *, after: int, limit: int
) -> Sequence[Row]:
    """A tenant's events behind a position, oldest first, as long as they are kept."""
    query = (
        sa.select(events)
        .where(
            events.c.client_id == client_id,
            events.c.position > after,
            events.c.created_at >= now - KEPT,
        )
        .order_by(events.c.position)
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def forget(connection: sa.Connection, now: datetime) -> None:
    """Delete what is older than `KEPT`, but the last event of each resource: its number must go on, not start again."""
    old, newer = now - KEPT, events.alias("newer")
    connection.execute(
        sa.delete(deliveries).where(
            deliveries.c.webhook_id.in_(sa.select(webhooks.c.id)),  # so that an index finds them
            deliveries.c.created_at < old,
            deliveries.c.next_attempt_at.is_(None),
        )
    )
    has_newer = sa.exists().where(
        newer.c.resource_id == events.c.resource_id, newer.c.sequence > events.c.sequence
    )
    is_awaited = sa.exists().where(deliveries.c.event_id == events.c.id)
    connection.execute(sa.delete(events).where(events.c.created_at < old, has_newer, ~is_awaited))
