"""The service's webhooks as events of a Prefect server, so that a new dataset can start a retrain.

Receives signed webhooks, checks them with the `standardwebhooks` library, and passes each on once: the Prefect event's
id is derived from the webhook's. It answers 2xx only when Prefect has taken the event, so the service tries again until
then. `make up` starts it; by hand: `python -m deployments.bridge`, with `TUNESHIP_BRIDGE_SECRET_FILE`, PREFECT_API_URL
and, where the Prefect server asks for one, PREFECT_API_AUTH_STRING.
"""

import argparse
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import httpx
import uvicorn
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from standardwebhooks import Webhook, WebhookVerificationError

from tuneship.settings import LocalSettings

logger = logging.getLogger(__name__)

# The service's events are below 20 kB.
MAX_BODY_BYTES = 64 << 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def prefect_event(webhook: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an event of the service to one of Prefect; its resource is e.g. `tuneship.dataset.ds_…`."""
    data: Mapping[str, Any] = webhook["data"]
    kind = str(data["object"]).rpartition(".")[2]
    return {
        # The same for every delivery of an event, so that Prefect stores a repeated one only once.
        "id": str(uuid5(NAMESPACE_URL, str(webhook["id"]))),
        "occurred": webhook["created_at"],
        "event": webhook["type"],
        "resource": {"prefect.resource.id": f"tuneship.{kind}.{data['id']}"},
        "related": [],
        "payload": dict(data),
    }


class Bridge:
    """An ASGI application that passes webhooks on to Prefect."""

    def __init__(self, secret: str, prefect_url: str, auth_string: str | None) -> None:
        """`secret`: `whsec_…` of the webhook; `prefect_url`: the API, e.g. http://127.0.0.1:4200/api."""
        self._webhook = Webhook(secret)
        user, _, password = (auth_string or "").partition(":")
        self._prefect = httpx.AsyncClient(
            base_url=prefect_url,
            auth=(user, password) if auth_string else None,
            trust_env=False,
            timeout=10.0,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 when Prefect has the event, 400 without a valid signature, 502 for a retry."""
        if scope["type"] != "http":
            return
        status = await self._answer(scope, receive) if scope["method"] == "POST" else 405
        head = {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-length", b"0")],
        }
        await send(head)
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Scope, receive: Receive) -> int:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            # Anyone on this machine can post here, and the signature is checked only on the whole body.
            if len(body) > MAX_BODY_BYTES:
                return 413
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            webhook: Any = self._webhook.verify(body, headers)
        except (WebhookVerificationError, ValueError):  # it raises both for bad headers
            logger.warning("a request without a valid signature was refused")
            return 400
        try:
            answer = await self._prefect.post("/events", json=[prefect_event(webhook)])
        except httpx.HTTPError as failure:
            logger.warning("the Prefect server did not take an event: %s", type(failure).__name__)
            return 502
        logger.info("%s %s -> %d", webhook["type"], webhook["id"], answer.status_code)
        return 200 if answer.is_success else 502


def main() -> None:
    """Serve on this machine only."""
    argparse.ArgumentParser(prog="deployments.bridge", description=__doc__).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings, prefect_url = LocalSettings(), PREFECT_API_URL.value()
    if not prefect_url or not settings.bridge_secret_file.is_file():
        sys.exit(
            "the bridge needs PREFECT_API_URL and the webhook's secret in TUNESHIP_BRIDGE_SECRET_FILE"
        )
    secret = json.loads(settings.bridge_secret_file.read_text())["secret"]
    uvicorn.run(
        Bridge(secret, prefect_url, PREFECT_API_AUTH_STRING.value()),
        host="127.0.0.1",
        port=settings.bridge_port,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
    )


if __name__ == "__main__":
    main()
