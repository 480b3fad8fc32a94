"""Webhooks: tasks whose answer holds a signing secret. It is shown once and is never stored here."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.create_once import once
from tuneship.contract.webhooks import (
    SecretRotation,
    WebhookCreate,
    WebhookSecret,
)
from tuneship.prefect.calls import RETRIES

# Prefect must not write the secret anywhere.
SECRET: dict[str, Any] = {**RETRIES, "cache_policy": NO_CACHE, "persist_result": False}


@task(**SECRET, task_run_name="create-webhook")
def create_webhook(webhook: WebhookCreate, run_key: str) -> WebhookSecret:
    """Subscribe an address, once for this run. The answer alone holds the secret."""
    content = webhook.model_dump(mode="json")
    return once(run_key, "create_webhook", content).webhooks.create(webhook)


@task(**SECRET, task_run_name="rotate-secret-{webhook_id}")
def rotate_webhook_secret(webhook_id: str, rotation: SecretRotation, run_key: str) -> WebhookSecret:
    """Draw a new secret, once for this run; both sign for a while."""
    content = [webhook_id, rotation.model_dump(mode="json")]
    return once(run_key, "rotate_webhook_secret", content).webhooks.rotate_secret(
        webhook_id, rotation
    )
