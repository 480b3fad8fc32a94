"""Rows of webhooks and of their deliveries: what is due, what came of it, and what is to be sent again."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.events import KINDS, covers
from tuneship.contract.webhooks import DeliveryStatus
from tuneship.store import queries as rows
from tuneship.store.queries import Page, Row
from tuneship.store.tables import deliveries, events, webhooks

# A webhook whose every try has failed for so long is switched off.
SWITCH_OFF_AFTER = timedelta(days=5)
SWITCHED_OFF, GONE, FAILING = "switched_off", "gone", "failing"


@dataclass(frozen=True)
class Due:
    """One delivery to try now: both rows it is made of."""

    webhook: Row
    event: Row
    attempts: int

    @property
    def key(self) -> tuple[str, str]:
        """The delivery's primary key."""
        return self.webhook["id"], self.event["id"]


def webhooks_with_due(connection: sa.Connection, now: datetime) -> Sequence[Row]:
    """Active webhooks that have something to send, those without trouble first."""
    is_due = sa.exists().where(
        deliveries.c.webhook_id == webhooks.c.id, deliveries.c.next_attempt_at <= now
    )
    query = (
        sa.select(webhooks)
        .where(webhooks.c.active, is_due)
        .order_by(webhooks.c.failing_since.is_not(None), webhooks.c.id)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def next_due(
    connection: sa.Connection, webhook: Row, now: datetime, busy: Collection[str], limit: int
) -> list[Due]:
    """Up to `limit` deliveries of one webhook whose time has come, but for the events in `busy`."""
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
    return [
        Due(webhook, dict(row), row["attempts"]) for row in connection.execute(query).mappings()
    ]


def record_success(connection: sa.Connection, due: Due, status: int, now: datetime) -> None:
    """A try succeeded: the delivery has ended, and the webhook is healthy."""
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
    **what: Any,
) -> bool:
    """A try failed (`failure`, `response_status`); answers whether only failures have come for `SWITCH_OFF_AFTER`.

    A webhook that was switched off meanwhile is not tried again.
    """
    query = sa.select(webhooks.c.active, webhooks.c.failing_since)
    webhook = connection.execute(query.where(webhooks.c.id == due.webhook["id"])).first()
    if webhook is None or not webhook.active:
        next_attempt_at = None
    status = DeliveryStatus.DEAD if next_attempt_at is None else DeliveryStatus.PENDING
    _settle(connection, due, now, status=status, next_attempt_at=next_attempt_at, **what)
    connection.execute(
        sa.update(webhooks)
        .where(webhooks.c.id == due.webhook["id"], webhooks.c.failing_since.is_(None))
        .values(failing_since=now)
    )
    since = webhook.failing_since if webhook is not None else None
    return since is not None and now - since >= SWITCH_OFF_AFTER


def _settle(connection: sa.Connection, due: Due, now: datetime, **values: Any) -> None:
    """Write what a try brought, unless the delivery was asked for again meanwhile: then it is sent once more."""
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
    """Send nothing more; what was waiting is `dead`, so that it is listed and can be replayed."""
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
    """Forget a webhook and its deliveries; the events stay."""
    connection.execute(sa.delete(deliveries).where(deliveries.c.webhook_id == webhook_id))
    connection.execute(sa.delete(webhooks).where(webhooks.c.id == webhook_id))


def _deliveries() -> "sa.Select[Any]":
    return sa.select(deliveries, events.c.type).join(events, events.c.id == deliveries.c.event_id)


def delivery(connection: sa.Connection, webhook_id: str, event_id: str) -> Row | None:
    """One delivery, with its event's `type`."""
    query = _deliveries().where(
        deliveries.c.webhook_id == webhook_id, deliveries.c.event_id == event_id
    )
    row = connection.execute(query).mappings().first()
    return None if row is None else dict(row)


def page(
    connection: sa.Connection, webhook_id: str, status: str | None, limit: int, offset: int
) -> Page:
    """Deliveries of a webhook, newest first."""
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
        rows=[dict(row) for row in connection.execute(query).mappings()],
        total=rows.count(connection, deliveries, *where),
        limit=limit,
        offset=offset,
    )


def resend(connection: sa.Connection, webhook_id: str, event_id: str, now: datetime) -> None:
    """Send one event once more, with all its tries."""
    _again(
        connection, now, deliveries.c.webhook_id == webhook_id, deliveries.c.event_id == event_id
    )


def _again(connection: sa.Connection, now: datetime, *where: sa.ColumnElement[bool]) -> int:
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
    """Which events to send again."""

    since: datetime
    until: datetime
    status: str
    """`dead`, `delivered`, `missing` or `all`."""


def replay(connection: sa.Connection, webhook: Row, window: ReplayWindow, now: datetime) -> int:
    """Queue the window's events again; answers how many. Of events never addressed here: those it subscribes to."""
    happened = (
        (events.c.client_id == webhook["client_id"])
        & (events.c.created_at >= window.since)
        & (events.c.created_at <= window.until)
    )
    count = 0
    if window.status != "missing":
        where = [
            deliveries.c.webhook_id == webhook["id"],
            deliveries.c.event_id.in_(sa.select(events.c.id).where(happened)),
        ]
        if window.status != "all":
            where.append(deliveries.c.status == window.status)
        count += _again(connection, now, *where)
    if window.status in ("missing", "all"):
        count += _address_missing(connection, webhook, happened, now)
    return count


def _address_missing(
    connection: sa.Connection, webhook: Row, happened: sa.ColumnElement[bool], now: datetime
) -> int:
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
    ).where(happened, events.c.type.in_(kinds), ~is_known, ~is_test)
    names = ["webhook_id", "event_id", "status", "attempts"]
    times = ["created_at", "updated_at", "next_attempt_at"]
    result = connection.execute(
        sa.insert(deliveries).from_select([*names, *times], chosen),
        execution_options={"preserve_rowcount": True},  # else an INSERT has none on Postgres
    )
    return result.rowcount
