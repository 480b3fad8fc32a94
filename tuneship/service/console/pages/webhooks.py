"""The list of webhooks."""

from dataclasses import dataclass

from tuneship.contract.common import Offset, Pagination
from tuneship.contract.webhooks import Webhook, list_webhooks
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class WebhooksView:
    """One page of the list."""

    webhooks: list[Webhook]
    pages: Pagination


@page("/console/webhooks", at=("Operate", 1), name="Webhooks", needs=list_webhooks)
async def webhooks(client: PageClient, offset: Offset = 0) -> WebhooksView:
    """Newest first."""
    found = await client.webhooks.list(limit=ROWS, offset=offset)
    return WebhooksView(found.webhooks, found.pagination)
