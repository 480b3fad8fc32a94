"""The rows of webhooks and their deliveries: find due ones, record outcomes, queue events to be sent again."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.events import KINDS, covers
from tuneship.contract.webhooks import DeliveryStatus
from tuneship.store.database import rows
from tuneship.store.database.rows import Page, fetch_all
from tuneship.store.database.tables import (
    EventRow,
    TypedDeliveryRow,
    WebhookRow,
    deliveries,
    events,
    webhooks,
)

# A webhook is switched off when every attempt has failed for this long.
SWITCH_OFF_AFTER = timedelta(days=5)
SWITCHED_OFF, GONE, FAILING = "switched_off", "gone", "failing"


@dataclass(frozen=True)
class Due:
    """A delivery that is due: its webhook, its event and the number of attempts so far."""

    webhook: WebhookRow
    event: EventRow
    attempts: int

    @property
    def key(self) -> tuple[str, str]:
        """The delivery's primary key: ids of webhook and event."""
        return self.webhook["id"], self.event["id"]


def webhooks_with_due(connection: sa.Connection, now: datetime) -> Sequence[WebhookRow]:
    """Active webhooks with due deliveries; those whose last attempt succeeded come first."""
    is_due = sa.exists().where(
        deliveries.c.webhook_id == webhooks.c.id, deliveries.c.next_attempt_at <= now
    )
    query = (
        sa.select(webhooks)
        .where(webhooks.c.active, is_due)
        .order_by(webhooks.c.failing_since.is_not(None), webhooks.c.id)
    )
    return fetch_all(connection, query)


def next_due(
    connection: sa.Connection, webhook: WebhookRow, now: datetime, busy: Collection[str], limit: int
) -> list[Due]:
    """Up to `limit` due deliveries of one webhook, except those of the events in `busy`."""
    query = (
        sa.select(events, deliveries.c.attempts)
        .join(deliveries, deliveries.c.event_id == events.c.id)
        .where(
            deliveries.c.webhook_id == webhook["id"],
            deliveries.c.next_attempt_at <= now,
            deliveries.c.event_id.not_in(busy),
        )
        .order_by(deliveries.c.next_attempt_at, events.c.position)
        .limit(limit)
    )
    return [Due(webhook, row, row["attempts"]) for row in fetch_all(connection, query)]


def record_success(connection: sa.Connection, due: Due, status: int, now: datetime) -> None:
    """Record a successful attempt: the delivery is finished, and the webhook is healthy."""
    _settle(connection, due, now, status=DeliveryStatus.DELIVERED, response_status=status)
    connection.execute(
        sa.update(webhooks)
        .where(webhooks.c.id == due.webhook["id"], webhooks.c.failing_since.is_not(None))
        .values(failing_since=None)
    )


def record_failure(
    connection: sa.Connection,
    due: Due,
    now: datetime,
    next_attempt_at: datetime | None,
    **outcome: Any,
) -> bool:
    """Record a failed attempt; returns whether every attempt has failed for `SWITCH_OFF_AFTER`.

    `next_attempt_at` is None after the last attempt; it is ignored if the webhook was switched off meanwhile.
    `outcome`: the columns `failure` and `response_status`.
    """
    query = sa.select(webhooks.c.active, webhooks.c.failing_since)
    webhook = connection.execute(query.where(webhooks.c.id == due.webhook["id"])).first()
    if webhook is None or not webhook.active:
        next_attempt_at = None
    status = DeliveryStatus.DEAD if next_attempt_at is None else DeliveryStatus.PENDING
    _settle(connection, due, now, status=status, next_attempt_at=next_attempt_at, **outcome)
    connection.execute(
        sa.update(webhooks)
        .where(webhooks.c.id == due.webhook["id"], webhooks.c.failing_since.is_(None))
        .values(failing_since=now)
    )
    since = webhook.failing_since if webhook is not None else None
    return since is not None and now - since >= SWITCH_OFF_AFTER


def _settle(connection: sa.Connection, due: Due, now: datetime, **values: Any) -> None:
    """Store the outcome of an attempt, unless a resend has reset the delivery meanwhile, which is then still due."""
    outcome = {"next_attempt_at": None, "failure": None, "response_status": None} | values
    webhook_id, event_id = due.key
    connection.execute(
        sa.update(deliveries)
        .where(
            deliveries.c.webhook_id == webhook_id,
            deliveries.c.event_id == event_id,
            deliveries.c.attempts == due.attempts,
        )
        .values(attempts=due.attempts + 1, updated_at=now, **outcome)
    )


def switch_off(
    connection: sa.Connection, webhook_id: str, reason: str | None, now: datetime
) -> None:
    """Stop deliveries to a webhook; pending ones become `dead`, so that they are listed and can be replayed."""
    rows.change(connection, webhooks, webhook_id, now, active=False, disabled_reason=reason)
    connection.execute(
        sa.update(deliveries)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.status == DeliveryStatus.PENDING)
        .values(
            status=DeliveryStatus.DEAD,
            next_attempt_at=None,
            failure=SWITCHED_OFF,
            updated_at=now,
        )
    )


def delete(connection: sa.Connection, webhook_id: str) -> None:
    """Delete a webhook and its deliveries; the events stay."""
    connection.execute(sa.delete(deliveries).where(deliveries.c.webhook_id == webhook_id))
    connection.execute(sa.delete(webhooks).where(webhooks.c.id == webhook_id))


def _deliveries() -> "sa.Select[Any]":
    return sa.select(deliveries, events.c.type).join(events, events.c.id == deliveries.c.event_id)


def delivery(connection: sa.Connection, webhook_id: str, event_id: str) -> TypedDeliveryRow | None:
    """Fetch one delivery with the type of its event; None if there is none."""
    query = _deliveries().where(
        deliveries.c.webhook_id == webhook_id, deliveries.c.event_id == event_id
    )
    found = fetch_all(connection, query)
    return found[0] if found else None


def page(
    connection: sa.Connection, webhook_id: str, status: str | None, limit: int, offset: int
) -> Page[TypedDeliveryRow]:
    """One page of a webhook's deliveries, newest first."""
    where = [deliveries.c.webhook_id == webhook_id]
    if status is not None:
        where.append(deliveries.c.status == status)
    query = (
        _deliveries()
        .where(*where)
        .order_by(deliveries.c.created_at.desc(), deliveries.c.event_id.desc())
        .limit(limit)
        .offset(offset)
    )
    return Page(
        rows=fetch_all(connection, query),
        total=rows.count(connection, deliveries, *where),
        limit=limit,
        offset=offset,
    )


def resend(connection: sa.Connection, webhook_id: str, event_id: str, now: datetime) -> None:
    """Queue a delivery again, with the full number of attempts."""
    _queue_again(
        connection, now, deliveries.c.webhook_id == webhook_id, deliveries.c.event_id == event_id
    )


def _queue_again(connection: sa.Connection, now: datetime, *where: sa.ColumnElement[bool]) -> int:
    """Reset the matching deliveries, so that they are due now; returns their number."""
    result = connection.execute(
        sa.update(deliveries)
        .where(*where)
        .values(
            status=DeliveryStatus.PENDING,
            attempts=0,
            next_attempt_at=now,
            updated_at=now,
            response_status=None,
            failure=None,
        )
    )
    return result.rowcount


@dataclass(frozen=True)
class ReplayWindow:
    """The events to replay: those of a time span, by the status of their delivery."""

    since: datetime
    until: datetime
    # `dead`, `delivered`, `missing` (never queued for this webhook) or `all`.
    status: str


def replay(
    connection: sa.Connection, webhook: WebhookRow, window: ReplayWindow, now: datetime
) -> int:
    """Queue the events of a window again, and missing ones to which the webhook subscribes; returns their number."""
    in_window = (
        (events.c.client_id == webhook["client_id"])
        & (events.c.created_at >= window.since)
        & (events.c.created_at <= window.until)
    )
    count = 0
    if window.status != "missing":
        where = [
            deliveries.c.webhook_id == webhook["id"],
            deliveries.c.event_id.in_(sa.select(events.c.id).where(in_window)),
        ]
        if window.status != "all":
            where.append(deliveries.c.status == window.status)
        count += _queue_again(connection, now, *where)
    if window.status in ("missing", "all"):
        count += _queue_missing(connection, webhook, in_window, now)
    return count


def _queue_missing(
    connection: sa.Connection, webhook: WebhookRow, in_window: sa.ColumnElement[bool], now: datetime
) -> int:
    """Queue the subscribed events that have no delivery to this webhook; returns their number."""
    kinds = [kind for kind in KINDS if covers(webhook["events"], kind)]
    is_known = sa.exists().where(
        deliveries.c.webhook_id == webhook["id"], deliveries.c.event_id == events.c.id
    )
    is_test = events.c.resource_id.startswith("wh_", autoescape=True)
    moment = sa.literal(now, deliveries.c.created_at.type)
    chosen = sa.select(
        sa.literal(webhook["id"]),
        events.c.id,
        sa.literal(str(DeliveryStatus.PENDING)),
        sa.literal(0),
        *(moment,) * 3,
    ).where(in_window, events.c.type.in_(kinds), ~is_known, ~is_test)
    names = ["webhook_id", "event_id", "status", "attempts"]
    times = ["created_at", "updated_at", "next_attempt_at"]
    result = connection.execute(
        sa.insert(deliveries).from_select([*names, *times], chosen),
        execution_options={
            "preserve_rowcount": True
        },  # without it, Postgres reports no count for INSERT
    )
    return result.rowcount
