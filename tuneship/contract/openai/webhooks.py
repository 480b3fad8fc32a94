"""Webhooks of OpenAI's API: receivers that hear how jobs, batches and runs of evals end, as its clients unwrap it."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from tuneship.contract.common import ONE_LINE, Reply, WebhookId
from tuneship.contract.declaring.examples import WEBHOOK
from tuneship.contract.declaring.operation import Example
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.ids import shown_id
from tuneship.contract.openai.lists import AfterId, ListedObject, ObjectPage, PageSize
from tuneship.contract.openai.request_fields import OpenAIRequest
from tuneship.contract.webhooks import Url

# The form of the deliveries of webhooks that were made here.
OPENAI_PROFILE = "openai"
# The events that a webhook can subscribe to.
EventType = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "eval.run.succeeded",
    "eval.run.failed",
    "eval.run.canceled",
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
]
EVENT_TYPES: tuple[str, ...] = get_args(EventType)
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=32)]
EndpointName = Annotated[str, Field(min_length=1, max_length=512, pattern=ONE_LINE)]


class WebhookEndpointCreate(OpenAIRequest):
    """A receiver as a client registers it."""

    event_types: EventTypes
    name: EndpointName
    url: Url


class WebhookEndpointUpdate(OpenAIRequest):
    """Fields that are not sent stay."""

    event_types: EventTypes | None = None
    name: EndpointName | None = None
    url: Url | None = None


class WebhookSecretRotation(OpenAIRequest):
    """Whether the old secret signs beside the new one for a day."""

    keep_old_secret_active_for_24_hours: bool = False


class WebhookEndpointTest(OpenAIRequest):
    """The kind of event to send."""

    event_type: EventType


class WebhookEndpointObject(ListedObject):
    """A receiver."""

    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    event_types: list[str]
    name: str
    url: str


class WebhookEndpointSecret(WebhookEndpointObject):
    """A receiver with its secret, which is shown only here."""

    signing_secret: str


class WebhookEndpointObjects(ObjectPage[WebhookEndpointObject]):
    """A page of receivers, newest first."""


class WebhookEndpointDeleted(Reply):
    """The answer to a delete."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class WebhookEndpointTested(Reply):
    """The status of a receiver's answer to a test, whatever it is."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    event_type: EventType
    status_code: int
    success: Literal[True] = True
    webhook_endpoint_id: str


class WebhookEventTypes(Reply):
    """The kinds of events."""

    object: Literal["list"] = "list"
    data: list[str]


class DeliveredResource(Reply):
    """The job, the batch or the run that an event is about."""

    id: str


class DeliveredEvent(Reply):
    """The body of a delivery: nothing but ids and a moment."""

    id: str
    object: Literal["event"] = "event"
    created_at: int
    type: str
    data: DeliveredResource


def openai_event(row: dict[str, Any]) -> DeliveredEvent:
    """The form of a stored event (`id`, `type`, `resource_id`, `created_at`) that OpenAI's clients unwrap."""
    resource: str = row["resource_id"]
    shown = shown_id(resource) if resource.startswith("ft_") else resource
    return DeliveredEvent(
        id=row["id"],
        created_at=int(row["created_at"].timestamp()),
        type=row["type"],
        data=DeliveredResource(id=shown),
    )


EXAMPLE_ENDPOINT: dict[str, Any] = {
    "id": WEBHOOK,
    "object": "webhook_endpoint",
    "created_at": 1_772_366_400,
    "updated_at": 1_772_366_400,
    "event_types": ["batch.completed", "fine_tuning.job.failed"],
    "name": "Pages the one on duty",
    "url": "https://hooks.example.com/openai",
}
EXAMPLE_CREATE = {name: EXAMPLE_ENDPOINT[name] for name in ("event_types", "name", "url")}
EXAMPLE_SECRET = {**EXAMPLE_ENDPOINT, "signing_secret": "whsec_" + "A" * 43 + "="}


@openai_operation(
    "POST",
    "webhook_endpoints",
    scope="webhooks:write",
    changes=True,
    example=Example({"batches": EXAMPLE_CREATE}, EXAMPLE_SECRET),
)
def openai_create_webhook(webhook: WebhookEndpointCreate) -> WebhookEndpointSecret:
    """Register a receiver; the answer holds its secret, once."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "webhook_endpoints",
    scope="webhooks:read",
    example=Example(
        reply={
            "object": "list",
            "data": [EXAMPLE_ENDPOINT],
            "first_id": WEBHOOK,
            "last_id": WEBHOOK,
            "has_more": False,
        }
    ),
)
def openai_list_webhooks(
    after: AfterId | None = None, limit: PageSize = 20
) -> WebhookEndpointObjects:
    """List the receivers that were registered here, newest first."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "webhook_endpoints/{webhook_id}",
    scope="webhooks:read",
    example=Example(reply=EXAMPLE_ENDPOINT),
)
def openai_get_webhook(webhook_id: WebhookId) -> WebhookEndpointObject:
    """Fetch one receiver."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "webhook_endpoints/{webhook_id}",
    scope="webhooks:write",
    changes=True,
    example=Example({"another name": {"name": EXAMPLE_ENDPOINT["name"]}}, EXAMPLE_ENDPOINT),
)
def openai_update_webhook(
    webhook_id: WebhookId, update: WebhookEndpointUpdate
) -> WebhookEndpointObject:
    """Change the address, the events or the name."""
    raise NotImplementedError


@openai_operation(
    "DELETE",
    "webhook_endpoints/{webhook_id}",
    scope="webhooks:write",
    changes=True,
    example=Example(reply={"id": WEBHOOK, "object": "webhook_endpoint.deleted", "deleted": True}),
)
def openai_delete_webhook(webhook_id: WebhookId) -> WebhookEndpointDeleted:
    """Delete a receiver with its deliveries."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "webhook_endpoints/{webhook_id}/rotate_secret",
    scope="webhooks:write",
    changes=True,
    example=Example({"a day": {"keep_old_secret_active_for_24_hours": True}}, EXAMPLE_SECRET),
)
def openai_rotate_webhook_secret(
    webhook_id: WebhookId, rotation: WebhookSecretRotation
) -> WebhookEndpointSecret:
    """Create a new secret; the old one ends at once unless it is kept for a day."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "webhook_endpoints/{webhook_id}/test",
    scope="webhooks:write",
    example=Example(
        {"a batch": {"event_type": "batch.completed"}},
        {
            "object": "webhook_endpoint.test",
            "event_type": "batch.completed",
            "status_code": 204,
            "success": True,
            "webhook_endpoint_id": WEBHOOK,
        },
    ),
)
def openai_test_webhook(webhook_id: WebhookId, test: WebhookEndpointTest) -> WebhookEndpointTested:
    """Send an event of this kind once and wait for the receiver's answer; 400 where none comes."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "webhook_event_types",
    scope="webhooks:read",
    example=Example(reply={"object": "list", "data": [*EVENT_TYPES]}),
)
def openai_list_webhook_event_types() -> WebhookEventTypes:
    """List the kinds of events that a receiver can subscribe to."""
    raise NotImplementedError
