"""Handlers of webhooks: those of the main API, whose deliveries have OpenAI's form."""

import asyncio
from typing import Any

from tuneship.contract.errors import ResourceNotFound
from tuneship.contract.openai import webhooks as contract
from tuneship.contract.openai.webhooks import (
    EVENT_TYPES,
    OPENAI_PROFILE,
    WebhookEndpointCreate,
    WebhookEndpointDeleted,
    WebhookEndpointObject,
    WebhookEndpointObjects,
    WebhookEndpointSecret,
    WebhookEndpointTest,
    WebhookEndpointTested,
    WebhookEndpointUpdate,
    WebhookEventTypes,
    WebhookSecretRotation,
    openai_event,
)
from tuneship.contract.webhooks import (
    SecretRotation,
    Webhook,
    WebhookCreate,
    WebhookSecret,
    WebhookUpdate,
)
from tuneship.events.attempt import Sender
from tuneship.events.delivery import signing_secrets
from tuneship.events.signing import signed_headers
from tuneship.service.answers.field_errors import with_names
from tuneship.service.context.context import Context
from tuneship.service.events import webhooks
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.errors import INVALID, OpenAIError
from tuneship.service.openai.lists import page_behind
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import WEBHOOKS
from tuneship.store.database.tables import WebhookRow

# OpenAI's names of the main API's fields.
NAMES = {"events": "event_types", "description": "name"}
OVERLAP_HOURS = 24
# Of the ids that events are about, by the first word of their kind.
PREFIXES = {"batch": "batch", "eval": "evl", "fine_tuning": "ft"}


@serves_openai(contract.openai_create_webhook)
def openai_create_webhook(
    context: Context, webhook: WebhookEndpointCreate
) -> WebhookEndpointSecret:
    """Register a webhook of the main API with another form of its deliveries."""
    wanted = WebhookCreate.model_validate(
        {"url": webhook.url, "events": webhook.event_types, "description": webhook.name}
    )
    with with_names(NAMES):
        made = webhooks.add_webhook(context, wanted, profile=OPENAI_PROFILE)
    context.audit_facts.created_id = made.id
    context.headers["Location"] = f"/openai/v1/webhook_endpoints/{made.id}"
    return _with_secret(made)


def _own(context: Context, webhook_id: str) -> WebhookRow:
    with context.read() as connection:
        row = rows.fetch(connection, tables.webhooks, webhook_id, client_id=context.client_id)
    if row is None or row["profile"] != OPENAI_PROFILE:
        raise ResourceNotFound("there is no such webhook endpoint")
    return row


def _fields(webhook: Webhook) -> dict[str, Any]:
    return {
        "id": webhook.id,
        "created_at": int(webhook.created_at.timestamp()),
        "updated_at": int(webhook.updated_at.timestamp()),
        "event_types": webhook.events,
        "name": webhook.description,
        "url": webhook.url,
    }


def _shown(webhook: Webhook) -> WebhookEndpointObject:
    return WebhookEndpointObject(**_fields(webhook))


def _with_secret(made: WebhookSecret) -> WebhookEndpointSecret:
    return WebhookEndpointSecret(**_fields(made), signing_secret=made.secret)


@serves_openai(contract.openai_list_webhooks)
def openai_list_webhooks(
    context: Context, after: str | None = None, limit: int = 20
) -> WebhookEndpointObjects:
    """Return a page of the webhooks that were made here."""
    of_this_form = [tables.webhooks.c.profile == OPENAI_PROFILE]
    page, has_more = page_behind(context, WEBHOOKS, of_this_form, after, limit)
    return WebhookEndpointObjects.of(
        [_shown(Webhook.model_validate(row)) for row in page], has_more=has_more
    )


@serves_openai(contract.openai_get_webhook)
def openai_get_webhook(context: Context, webhook_id: str) -> WebhookEndpointObject:
    """Return the record, without its secret."""
    return _shown(Webhook.model_validate(_own(context, webhook_id)))


@serves_openai(contract.openai_update_webhook)
def openai_update_webhook(
    context: Context, webhook_id: str, update: WebhookEndpointUpdate
) -> WebhookEndpointObject:
    """Change the webhook as the main API does."""
    _own(context, webhook_id)
    sent = {"url": update.url, "events": update.event_types, "description": update.name}
    changes = {name: value for name, value in sent.items() if value is not None}
    with with_names(NAMES):
        wanted = WebhookUpdate.model_validate(changes)
        return _shown(webhooks.update_webhook(context, webhook_id, wanted))


@serves_openai(contract.openai_delete_webhook)
def openai_delete_webhook(context: Context, webhook_id: str) -> WebhookEndpointDeleted:
    """Delete the webhook as the main API does."""
    _own(context, webhook_id)
    webhooks.delete_webhook(context, webhook_id)
    return WebhookEndpointDeleted(id=webhook_id)


@serves_openai(contract.openai_rotate_webhook_secret)
def openai_rotate_webhook_secret(
    context: Context, webhook_id: str, rotation: WebhookSecretRotation
) -> WebhookEndpointSecret:
    """Replace the secret as the main API does."""
    _own(context, webhook_id)
    hours = OVERLAP_HOURS if rotation.keep_old_secret_active_for_24_hours else 0
    wanted = SecretRotation(overlap_hours=hours)
    made = webhooks.rotate_webhook_secret(context, webhook_id, wanted)
    return _with_secret(made)


@serves_openai(contract.openai_test_webhook)
async def openai_test_webhook(
    context: Context, webhook_id: str, test: WebhookEndpointTest
) -> WebhookEndpointTested:
    """Send an event of this kind once, under an id that nothing has, and wait for the receiver's status."""
    parts, now = context.parts, context.now
    webhook = await asyncio.to_thread(_own, context, webhook_id)
    about = new_id(PREFIXES[test.event_type.partition(".")[0]])
    event_id = new_id("evt")
    sample = {"id": event_id, "type": test.event_type, "resource_id": about, "created_at": now}
    body = openai_event(sample).model_dump_json().encode()
    secrets = signing_secrets(parts.vault, webhook, now)
    headers = signed_headers(secrets, event_id, int(now.timestamp()), body)
    # A thread, as it reads all certificate authorities.
    sender = await asyncio.to_thread(Sender, parts.receivers)
    outcome = await sender.send(webhook["url"], headers, body, now)
    if outcome.status is None:
        text = "the receiver gave no answer"
        raise OpenAIError(text, 400, (INVALID, str(outcome.failure)))
    return WebhookEndpointTested(
        event_type=test.event_type, status_code=outcome.status, webhook_endpoint_id=webhook_id
    )


@serves_openai(contract.openai_list_webhook_event_types)
def openai_list_webhook_event_types(context: Context) -> WebhookEventTypes:  # noqa: ARG001 - the same for everybody
    """Return the kinds of events."""
    return WebhookEventTypes(data=[*EVENT_TYPES])
