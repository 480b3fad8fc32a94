"""The outbox: each change of state writes, in its own transaction, an event and a delivery for each subscribed webhook.

Both commit with the change or not at all, so no event is lost if the process dies between a change and its delivery.
A tenant has one writer at a time (`database.py`), so a resource's sequence numbers have no gaps, and a tenant's events
become visible in the order of their positions.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.events import EventKind, covers
from tuneship.contract.webhooks import DeliveryStatus
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.rows import Row, fetch_all
from tuneship.store.database.tables import EventRow, deliveries, events, webhooks

KEPT = timedelta(days=30)
# The longest text in an event, which keeps an event far below 20 kB.
MAX_TEXT_CHARACTERS = 500
# Fields whose texts are codes of the service; events about resources in HIPAA mode hold only these, and numbers.
CODE_FIELDS = frozenset({"status", "from", "to", "reason", "code", "verdict", "stage", "outcome"})


def emit(connection: sa.Connection, kind: str, resource: Row, now: datetime, **data: Any) -> None:
    """Add an event of `kind` (§6) about a resource, and queue it for every webhook that subscribes to it.

    `resource`: a row with `id`, `client_id` and `status`. `data`: a summary in numbers, ids and codes of the service.
    Raises `ValueError` for an unknown kind.
    """
    kind = EventKind(kind)
    data.setdefault("status", resource.get("status"))
    settings: Mapping[str, Any] = resource.get("security_settings") or {}
    if settings.get("compliance_mode") == "hipaa":
        # Free text might quote a user's text, and a receiver may be outside the boundary.
        data = {
            name: value
            for name, value in data.items()
            if name in CODE_FIELDS or value is None or isinstance(value, int | float)
        }
    data = {
        name: value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else value
        for name, value in data.items()
    }
    row = {"client_id": resource["client_id"], "resource_id": resource["id"], "type": kind}
    identifier = add(connection, row, now, data)
    query = sa.select(webhooks.c.id, webhooks.c.events).where(
        webhooks.c.client_id == resource["client_id"], webhooks.c.active
    )
    for webhook in connection.execute(query).all():
        if covers(webhook.events, kind):
            queue_delivery(connection, webhook.id, identifier, now)


def add(connection: sa.Connection, row: Row, now: datetime, data: dict[str, Any]) -> str:
    """Store an event with its resource's next sequence number; returns its id.

    `row`: the columns `client_id`, `resource_id` and `type`.
    """
    last = sa.select(sa.func.coalesce(sa.func.max(events.c.sequence), 0)).where(
        events.c.resource_id == row["resource_id"]
    )
    identifier, sequence = new_id("evt"), connection.execute(last).scalar_one() + 1
    connection.execute(
        sa.insert(events).values(**row, id=identifier, sequence=sequence, created_at=now, data=data)
    )
    return identifier


def queue_delivery(
    connection: sa.Connection, webhook_id: str, event_id: str, now: datetime
) -> None:
    """Queue the delivery of an event to one webhook, due now."""
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
) -> Sequence[EventRow]:
    """The next stored events of a tenant after a position, oldest first."""
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
    return fetch_all(connection, query)


def forget(connection: sa.Connection, now: datetime) -> None:
    """Delete ended deliveries and events that are older than `KEPT`.

    The last event of each resource stays, because its sequence numbers must continue from it. So do events with
    deliveries.
    """
    old, newer = now - KEPT, events.alias("newer")
    connection.execute(
        sa.delete(deliveries).where(
            deliveries.c.webhook_id.in_(sa.select(webhooks.c.id)),  # lets an index find them
            deliveries.c.created_at < old,
            deliveries.c.next_attempt_at.is_(None),
        )
    )
    has_newer = sa.exists().where(
        newer.c.resource_id == events.c.resource_id, newer.c.sequence > events.c.sequence
    )
    is_awaited = sa.exists().where(deliveries.c.event_id == events.c.id)
    connection.execute(sa.delete(events).where(events.c.created_at < old, has_newer, ~is_awaited))
