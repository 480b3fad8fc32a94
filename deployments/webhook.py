"""Creates the webhook that feeds the bridge, once, and keeps its secret in a file that only its owner can read."""

import json
from pathlib import Path

from tuneship.client import Client
from tuneship.contract.webhooks import SecretRotation, WebhookCreate, WebhookSecret, WebhookUpdate
from tuneship.host.durable import write_private
from tuneship.settings import ClientSettings

DESCRIPTION = "Events for the Prefect server"


def ensure_webhook(settings: ClientSettings, url: str, secret_file: Path) -> bool:
    """Make the service call `url`, with the secret in `secret_file`; a lost file means a new secret.

    Returns whether the secret is new, so that a running bridge does not know it. Raises `ApiError` and the like.
    """
    with Client(settings) as client:
        found = next((one for one in client.webhooks.iterate() if one.url == url), None)
        if found is None:
            wanted = WebhookCreate(url=url, events=["*"], description=DESCRIPTION)
            _keep(secret_file, client.webhooks.create(wanted))
            return True
        try:
            kept = str(json.loads(secret_file.read_text())["id"])
        except (OSError, ValueError, KeyError):
            kept = None
        is_new = kept != found.id
        if is_new:
            # The service shows a secret only once, so a lost one has to be replaced.
            rotation = SecretRotation(overlap_hours=0)
            _keep(secret_file, client.webhooks.rotate_secret(found.id, rotation))
        if not found.active:  # the service switches off a receiver that failed for days
            client.webhooks.update(found.id, WebhookUpdate(active=True))
        return is_new


def _keep(secret_file: Path, webhook: WebhookSecret) -> None:
    secret_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(secret_file, json.dumps({"id": webhook.id, "secret": webhook.secret}) + "\n")
