"""Webhooks on the wire (additive to §6): receivers of events, signing secrets and deliveries.

Deliveries follow Standard Webhooks 1.0. `docs/webhooks.md` says how to receive and verify them.
"""

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import (
    ONE_LINE,
    CreateRequest,
    Deleted,
    EventId,
    Limit,
    Offset,
    Pagination,
    Reply,
    Request,
    Timestamp,
    TimestampMs,
    WebhookId,
    absent,
)
from tuneship.contract.declaring.examples import EVENT, LATER, NOON, NOON_MS, PAGE, WEBHOOK
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb
from tuneship.contract.errors import InvalidRequestError, QuotaExceeded
from tuneship.contract.events import Kind, Subscription

Url = Annotated[
    str,
    Field(
        min_length=1,
        max_length=2048,
        description="https; no user name, no fragment.\n\n"
        "Only public addresses are called, checked after each name resolution. The operator may allow private networks "
        "and plain http, but never link-local addresses, those of a cloud's metadata, and the service's own ports.",
    ),
]
Subscriptions = Annotated[
    list[Subscription],
    Field(
        min_length=1,
        max_length=32,
        description="Kinds of events, families of them (`dataset.*`), or `*` for all.",
    ),
]
Description = Annotated[str, Field(max_length=512, pattern=ONE_LINE)]
# `fromisoformat` takes more forms than receivers in other languages do, dates without a zone among them.
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)


def _utc(value: object) -> object:
    """Parse a time in a body, a text with a zone. Pydantic refuses anything else."""
    if not isinstance(value, str):
        return value
    try:
        if RFC_3339.fullmatch(value):
            return datetime.fromisoformat(value).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError("must be an RFC 3339 time with a zone")


Moment = Annotated[datetime, BeforeValidator(_utc)]


class DeliveryStatus(StrEnum):
    """States of a delivery. `pending`: attempts are left. `dead`: none are; retry or replay sends it again."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


class WebhookCreate(CreateRequest):
    """A receiver as a client registers it."""

    url: Url
    events: Subscriptions
    description: Description = ""
    active: bool = True


class WebhookUpdate(Request):
    """A merge patch: fields that are not sent stay. `active: true` switches a webhook on again."""

    url: Url | None = None
    events: Subscriptions | None = None
    description: Description | None = None
    active: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_null(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, field in cast("dict[str, Any]", value).items():
                # Null would remove a field in a merge patch, and none of these can be removed.
                if field is None and name in cls.model_fields:
                    raise PydanticCustomError("null", "cannot be null", {"param": name})
        return cast("Any", value)


class SecretRotation(CreateRequest):
    """Both secrets sign for `overlap_hours`, so that receivers can change over; 0 ends the old one at once."""

    overlap_hours: Annotated[int, Field(ge=0, le=168)] = 24


class WebhookTest(CreateRequest):
    """The kind of the test event. Its `data` says `test: true` and names the webhook itself."""

    type: Kind = "fine_tuning.job.succeeded"


class Replay(CreateRequest):
    """Events of a span of time to send again: the dead, the delivered, those never addressed here, or all."""

    since: Moment | None = None
    until: Moment | None = None
    status: Literal["dead", "delivered", "missing", "all"] = "dead"


class Webhook(Reply):
    """A receiver. The service switches it off (`active: false`) after a 410 or five days of failures, and says why."""

    id: str
    url: str
    events: list[str]
    description: str
    active: bool
    disabled_reason: Annotated[str | None, Field(exclude_if=absent)] = None
    created_at: Timestamp
    updated_at: Timestamp


class WebhookSecret(Webhook):
    """A receiver with its signing secret, shown only here."""

    secret: str


class WebhookPage(Reply):
    """One page of webhooks, newest first."""

    webhooks: list[Webhook]
    pagination: Pagination


class Delivery(Reply):
    """The delivery of one event to one receiver. `failure` is a word of the service, never text of the receiver."""

    event_id: str
    type: str
    status: str
    attempts: int
    response_status: int | None = None
    failure: str | None = None
    next_attempt_at: TimestampMs | None = None
    created_at: TimestampMs
    updated_at: TimestampMs


class DeliveryPage(Reply):
    """One page of deliveries, newest first."""

    deliveries: list[Delivery]
    pagination: Pagination


class Replayed(Reply):
    """How many deliveries were put back into the queue."""

    id: str
    replayed: int


# What is sent to a webhook that is switched off would never arrive.
INACTIVE = ((InvalidRequestError, 409),)


# Examples of the OpenAPI document.
EXAMPLE_WEBHOOK = {
    "id": WEBHOOK,
    "url": "https://hooks.example.com/tuneship",
    "events": ["fine_tuning.job.*", "deployment.error"],
    "description": "Pages the one on duty.",
    "active": True,
    "created_at": NOON,
    "updated_at": NOON,
}

EXAMPLE_SECRET = {"secret": "whsec_" + "A" * 43 + "="}

EXAMPLE_DELIVERY = {
    "event_id": EVENT,
    "type": "fine_tuning.job.succeeded",
    "status": "delivered",
    "attempts": 1,
    "response_status": 204,
    "failure": None,
    "next_attempt_at": None,
    "created_at": NOON_MS,
    "updated_at": NOON_MS,
}


@operation(
    "POST",
    "/v1/webhooks",
    scope="webhooks:write",
    status=201,
    errors=(QuotaExceeded,),
    example=Example(
        {"jobs": {"url": EXAMPLE_WEBHOOK["url"], "events": EXAMPLE_WEBHOOK["events"]}},
        {**EXAMPLE_WEBHOOK, **EXAMPLE_SECRET},
    ),
)
def create_webhook(webhook: WebhookCreate) -> WebhookSecret:
    """Register a receiver; the answer holds its secret, once (additive).

    Deliveries follow Standard Webhooks 1.0: `webhook-id` (the same in every attempt), `webhook-timestamp` and
    `webhook-signature: v1,...`. There are ten attempts over three days, until a 2xx answer. `Retry-After` is obeyed, a
    redirect is not followed; a 410, or five days of failures only, switches the webhook off.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/webhooks",
    scope="webhooks:read",
    example=Example(reply={"webhooks": [EXAMPLE_WEBHOOK], "pagination": PAGE}),
)
def list_webhooks(limit: Limit = 20, offset: Offset = 0) -> WebhookPage:
    """List receivers, newest first (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/webhooks/{webhook_id}",
    scope="webhooks:read",
    example=Example(reply=EXAMPLE_WEBHOOK),
)
def get_webhook(webhook_id: WebhookId) -> Webhook:
    """Fetch one receiver (additive)."""
    raise NotImplementedError


@operation(
    "PATCH",
    "/v1/webhooks/{webhook_id}",
    scope="webhooks:write",
    example=Example({"switch off": {"active": False}}, {**EXAMPLE_WEBHOOK, "active": False}),
)
def update_webhook(webhook_id: WebhookId, update: WebhookUpdate) -> Webhook:
    """Change address, events or description, or switch it on and off (additive)."""
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/webhooks/{webhook_id}",
    scope="webhooks:write",
    example=Example(reply={"id": WEBHOOK, "deleted": True}),
)
def delete_webhook(webhook_id: WebhookId) -> Deleted:
    """Delete a receiver (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/webhooks/{webhook_id}/rotate-secret",
    scope="webhooks:write",
    example=Example({"a day": {"overlap_hours": 24}}, {**EXAMPLE_WEBHOOK, **EXAMPLE_SECRET}),
)
def rotate_webhook_secret(webhook_id: WebhookId, rotation: SecretRotation) -> WebhookSecret:
    """Create a new secret; the old one also signs for a while (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/webhooks/{webhook_id}/test",
    scope="webhooks:write",
    errors=INACTIVE,
    example=Example({"a job": {"type": "fine_tuning.job.succeeded"}}, EXAMPLE_DELIVERY),
)
def send_test_event(webhook_id: WebhookId, test: WebhookTest) -> Delivery:
    """Send a test event to this receiver only (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/webhooks/{webhook_id}/deliveries",
    scope="webhooks:read",
    example=Example(reply={"deliveries": [EXAMPLE_DELIVERY], "pagination": PAGE}),
)
def list_webhook_deliveries(
    webhook_id: WebhookId,
    limit: Limit = 20,
    offset: Offset = 0,
    status: DeliveryStatus | None = None,
) -> DeliveryPage:
    """List the deliveries of this receiver, newest first (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/webhooks/{webhook_id}/deliveries/{event_id}/retry",
    scope="webhooks:write",
    errors=INACTIVE,
    example=Example(reply={**EXAMPLE_DELIVERY, "status": "pending", "response_status": None}),
)
def retry_webhook_delivery(webhook_id: WebhookId, event_id: EventId) -> Delivery:
    """Send one event again, with all its attempts (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/webhooks/{webhook_id}/replay",
    scope="webhooks:write",
    errors=INACTIVE,
    example=Example(
        {"what died": {"since": NOON, "until": LATER, "status": "dead"}},
        {"id": WEBHOOK, "replayed": 3},
    ),
)
def replay_webhook(webhook_id: WebhookId, replay: Replay) -> Replayed:
    """Send the events between two moments again (additive); by default the dead of the last 30 days."""
    raise NotImplementedError


class Webhooks(Resource[C_co]):
    """Receivers of events."""

    create = Verb(create_webhook)
    get = Verb(get_webhook)
    list = Verb(list_webhooks)
    iterate = Pages(list_webhooks, lambda page: page.webhooks)
    update = Verb(update_webhook)
    delete = Verb(delete_webhook)
    rotate_secret = Verb(rotate_webhook_secret)
    test = Verb(send_test_event)
    deliveries = Verb(list_webhook_deliveries)
    iterate_deliveries = Pages(list_webhook_deliveries, lambda page: page.deliveries)
    retry = Verb(retry_webhook_delivery)
    replay = Verb(replay_webhook)
