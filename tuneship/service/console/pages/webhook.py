"""One webhook: whether it is called, for what, and what became of each event there."""

from dataclasses import dataclass

from tuneship.contract.common import Offset, Pagination, WebhookId
from tuneship.contract.webhooks import Delivery, DeliveryStatus, Webhook
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class WebhookView:
    """A webhook, with one page of its deliveries and how they are filtered."""

    webhook: Webhook
    deliveries: list[Delivery]
    pages: Pagination
    status: DeliveryStatus | None
    pending: int
    dead: int
    statuses: tuple[str, ...] = tuple(DeliveryStatus)


@page("/console/webhooks/{webhook_id}")
async def webhook(
    client: PageClient,
    webhook_id: WebhookId,
    offset: Offset = 0,
    status: DeliveryStatus | None = None,
) -> WebhookView:
    """Deliveries newest first; the signing secret is shown nowhere."""
    found = await client.webhooks.get(webhook_id)
    shown = await client.webhooks.deliveries(webhook_id, limit=ROWS, offset=offset, status=status)
    pending, dead = [
        (await client.webhooks.deliveries(webhook_id, limit=1, status=one)).pagination.total
        for one in (DeliveryStatus.PENDING, DeliveryStatus.DEAD)
    ]
    return WebhookView(found, shown.deliveries, shown.pagination, status, pending, dead)
