"""Handlers of webhooks: check receivers, seal secrets, list and replay deliveries; `tuneship/events` sends."""

from datetime import timedelta
from typing import Any

from tuneship.contract import webhooks as contract
from tuneship.contract.common import Deleted
from tuneship.contract.errors import InternalError, InvalidRequestError, ResourceNotFound
from tuneship.contract.webhooks import (
    Delivery,
    DeliveryPage,
    Replay,
    Replayed,
    SecretRotation,
    Webhook,
    WebhookCreate,
    WebhookPage,
    WebhookSecret,
    WebhookTest,
    WebhookUpdate,
)
from tuneship.events.addresses import TargetRefused
from tuneship.events.connector import TooManyLookups
from tuneship.events.signing import new_secret
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.service.context.quotas import check_quota
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import WEBHOOKS
from tuneship.store.database.tables import WebhookRow
from tuneship.store.records import outbox, webhook_records
from tuneship.store.records.webhook_records import ReplayWindow


@serves(contract.create_webhook)
def create_webhook(context: Context, webhook: WebhookCreate) -> WebhookSecret:
    """Record a webhook with a new secret, which is only shown here."""
    return add_webhook(context, webhook)


def add_webhook(context: Context, webhook: WebhookCreate, **columns: str) -> WebhookSecret:
    """Record a webhook with a new secret; `columns` are additional columns of its row."""
    # The name is resolved before the transaction, so that no writer waits for a slow resolver.
    _check_url(context, webhook.url)
    check_quota(context, tables.webhooks, context.parts.settings.maximum_webhooks, "webhooks")
    identifier, secret = new_id("wh"), new_secret()
    row = rows.insert(
        context.transaction,
        tables.webhooks,
        {
            **webhook.model_dump(),
            "id": identifier,
            "client_id": context.client_id,
            "created_at": context.now,
            "updated_at": context.now,
            "tags": {},
            "secret": context.parts.vault.seal(secret.encode(), identifier),
            **columns,
        },
    )
    return _with_secret(row, secret)


def _check_url(context: Context, url: str) -> None:
    try:
        context.parts.receivers.check(url)
    except TargetRefused as reason:
        raise field_error("url", str(reason)) from None
    except TooManyLookups:
        text = "too many names of receivers are being looked up"
        raise InternalError(text, status=503, retry_after=1) from None


def _with_secret(row: WebhookRow, secret: str) -> WebhookSecret:
    return WebhookSecret.model_validate({**row, "secret": secret})


def _own(context: Context, webhook_id: str) -> WebhookRow:
    with context.read() as connection:
        row = rows.fetch(connection, tables.webhooks, webhook_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such webhook")
    return row


def _own_active(context: Context, webhook_id: str) -> WebhookRow:
    row = _own(context, webhook_id)
    if not row["active"]:
        raise InvalidRequestError("the webhook is switched off: set active to true", status=409)
    return row


@serves(contract.list_webhooks)
def list_webhooks(context: Context, limit: int = 20, offset: int = 0) -> WebhookPage:
    """Newest first."""
    page = own_page(context, WEBHOOKS, [], limit, offset)
    webhooks = [Webhook.model_validate(row) for row in page.rows]
    return WebhookPage(webhooks=webhooks, pagination=page.pagination)


@serves(contract.get_webhook)
def get_webhook(context: Context, webhook_id: str) -> Webhook:
    """The record, without its secret."""
    return Webhook.model_validate(_own(context, webhook_id))


@serves(contract.update_webhook)
def update_webhook(context: Context, webhook_id: str, update: WebhookUpdate) -> Webhook:
    """Change a webhook. When it is switched off, its pending deliveries become `dead`, and can be replayed later."""
    changes = update.model_dump(exclude_unset=True)
    if not changes:
        raise InvalidRequestError("the update is empty")
    if update.url is not None:
        _check_url(context, update.url)
    connection = context.transaction
    row = _own(context, webhook_id)
    if update.url not in (None, row["url"]):
        # The failures of the old address do not count for the new one.
        changes |= {"failing_since": None}
    if update.active and not row["active"]:
        changes |= {"disabled_reason": None, "failing_since": None}
    elif update.active is False and row["active"]:
        webhook_records.switch_off(connection, webhook_id, None, context.now)
    rows.change(connection, tables.webhooks, webhook_id, context.now, **changes)
    return get_webhook(context, webhook_id)


@serves(contract.delete_webhook)
def delete_webhook(context: Context, webhook_id: str) -> Deleted:
    """Delete a webhook with its deliveries; one in flight may still arrive."""
    connection = context.transaction
    webhook_records.delete(connection, _own(context, webhook_id)["id"])
    return Deleted(id=webhook_id)


@serves(contract.rotate_webhook_secret)
def rotate_webhook_secret(
    context: Context, webhook_id: str, rotation: SecretRotation
) -> WebhookSecret:
    """Replace the secret. At most two secrets sign: a rotation during a rotation ends the oldest."""
    connection, secret, now = context.transaction, new_secret(), context.now
    row = _own(context, webhook_id)
    # Receivers accept a request that one of its signatures fits, so they may change over at any time of the overlap.
    overlaps = rotation.overlap_hours > 0
    rows.change(
        connection,
        tables.webhooks,
        webhook_id,
        now,
        secret=context.parts.vault.seal(secret.encode(), webhook_id),
        previous_secret=row["secret"] if overlaps else None,
        previous_until=now + timedelta(hours=rotation.overlap_hours) if overlaps else None,
    )
    return _with_secret(_own(context, webhook_id), secret)


@serves(contract.send_test_event)
def send_test_event(context: Context, webhook_id: str, test: WebhookTest) -> Delivery:
    """Send an event about the webhook itself, to this receiver only, delivered and retried like any other."""
    connection, now = context.transaction, context.now
    row = _own_active(context, webhook_id)
    about = {"client_id": row["client_id"], "resource_id": webhook_id, "type": test.type}
    summary: dict[str, Any] = {"object": "webhook", "status": "active", "test": True}
    event_id = outbox.add(connection, about, now, summary)
    outbox.queue_delivery(connection, webhook_id, event_id, now)
    return _delivery(context, webhook_id, event_id)


def _delivery(context: Context, webhook_id: str, event_id: str) -> Delivery:
    with context.read() as connection:
        row = webhook_records.delivery(connection, webhook_id, event_id)
    if row is None:
        raise ResourceNotFound("there is no such delivery")
    return Delivery.model_validate(row)


@serves(contract.list_webhook_deliveries)
def list_webhook_deliveries(
    context: Context,
    webhook_id: str,
    limit: int = 20,
    offset: int = 0,
    status: contract.DeliveryStatus | None = None,
) -> DeliveryPage:
    """Newest first."""
    _own(context, webhook_id)
    with context.read() as connection:
        page = webhook_records.page(connection, webhook_id, status, limit, offset)
    deliveries = [Delivery.model_validate(row) for row in page.rows]
    return DeliveryPage(deliveries=deliveries, pagination=page.pagination)


@serves(contract.retry_webhook_delivery)
def retry_webhook_delivery(context: Context, webhook_id: str, event_id: str) -> Delivery:
    """Send a delivery again under the same id, whatever its status is."""
    connection = context.transaction
    _own_active(context, webhook_id)
    # A delivery that does not exist is 404: to queue it again would change nothing and look like success.
    _delivery(context, webhook_id, event_id)
    webhook_records.resend(connection, webhook_id, event_id, context.now)
    return _delivery(context, webhook_id, event_id)


@serves(contract.replay_webhook)
def replay_webhook(context: Context, webhook_id: str, replay: Replay) -> Replayed:
    """Send the deliveries between two moments again, by default all that are kept."""
    now = context.now
    # Older events have been deleted.
    window = ReplayWindow(replay.since or now - outbox.KEPT, replay.until or now, replay.status)
    if window.since >= window.until:
        raise field_error("since", "must lie before until")
    connection = context.transaction
    row = _own_active(context, webhook_id)
    return Replayed(id=webhook_id, replayed=webhook_records.replay(connection, row, window, now))
