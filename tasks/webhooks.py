"""Webhooks and events: who is told of what, and what has happened. A secret is shown once and is never stored here."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tasks.create_once import once
from tuneship.contract.common import Deleted
from tuneship.contract.events import EventPage
from tuneship.contract.webhooks import (
    Delivery,
    DeliveryStatus,
    Replay,
    Replayed,
    SecretRotation,
    Webhook,
    WebhookCreate,
    WebhookSecret,
    WebhookTest,
    WebhookUpdate,
)

# Options of the tasks whose answer holds a signing secret: Prefect must not write it anywhere.
SECRET: dict[str, Any] = {**RETRIES, "cache_policy": NO_CACHE, "persist_result": False}


@task(**SECRET, task_run_name="create-webhook")
def create_webhook(webhook: WebhookCreate, run_key: str) -> WebhookSecret:
    """Subscribe an address, once for this run. The answer alone holds the secret."""
    content = webhook.model_dump(mode="json")
    return once(run_key, "create_webhook", content).webhooks.create(webhook)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-webhooks")
def list_webhooks() -> list[Webhook]:
    """Every webhook of this client, all pages, newest first."""
    return list(api().webhooks.iterate(limit=100))


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-{webhook_id}")
def get_webhook(webhook_id: str) -> Webhook:
    """Fetch a webhook, without its secret."""
    return api().webhooks.get(webhook_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="update-{webhook_id}")
def update_webhook(webhook_id: str, update: WebhookUpdate) -> Webhook:
    """Change the address, the subscriptions, or switch it on again."""
    return api().webhooks.update(webhook_id, update)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="delete-{webhook_id}")
def delete_webhook(webhook_id: str) -> Deleted:
    """Remove a webhook and what it still had to deliver."""
    return api().webhooks.delete(webhook_id)


@task(**SECRET, task_run_name="rotate-secret-{webhook_id}")
def rotate_webhook_secret(webhook_id: str, rotation: SecretRotation, run_key: str) -> WebhookSecret:
    """Draw a new secret, once for this run; both sign for a while."""
    content = [webhook_id, rotation.model_dump(mode="json")]
    return once(run_key, "rotate_webhook_secret", content).webhooks.rotate_secret(
        webhook_id, rotation
    )


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="test-{webhook_id}")
def send_test_event(webhook_id: str, test: WebhookTest, run_key: str) -> Delivery:
    """Send one test event, once for this run."""
    content = [webhook_id, test.model_dump(mode="json")]
    return once(run_key, "send_test_event", content).webhooks.test(webhook_id, test)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="deliveries-{webhook_id}")
def list_webhook_deliveries(
    webhook_id: str, status: DeliveryStatus | None = None
) -> list[Delivery]:
    """Every delivery of a webhook, all pages, newest first."""
    return list(api().webhooks.iterate_deliveries(webhook_id, limit=100, status=status))


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="retry-{event_id}")
def retry_webhook_delivery(webhook_id: str, event_id: str, run_key: str) -> Delivery:
    """Deliver an event again now, once for this run."""
    client = once(run_key, "retry_webhook_delivery", [webhook_id, event_id])
    return client.webhooks.retry(webhook_id, event_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="replay-{webhook_id}")
def replay_webhook(webhook_id: str, replay: Replay, run_key: str) -> Replayed:
    """Deliver the events of a time again, once for this run."""
    content = [webhook_id, replay.model_dump(mode="json")]
    return once(run_key, "replay_webhook", content).webhooks.replay(webhook_id, replay)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-events")
def list_events(after: str | None = None) -> EventPage:
    """The next page of what has happened, oldest first; its cursor is `after` of the next call."""
    return api().events.list(limit=1000, after=after)
