"""Numbers about the rows of one tenant or of all, for the metrics of the service. A `client_id` of None means all."""

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.webhooks import DeliveryStatus
from tuneship.store.database.rows import Row, fetch_all
from tuneship.store.database.tables import deliveries, deployments, endpoints, webhooks

DEPLOYMENT_COLUMNS = ("id", "status", "health", "current_replicas")


@dataclass(frozen=True)
class WebhookBacklog:
    """The deliveries of one webhook that wait for an attempt; `oldest` is when the first of them was queued."""

    webhook_id: str
    is_active: bool
    pending: int
    oldest: datetime | None


def by_status(
    connection: sa.Connection, table: sa.Table, client_id: str | None = None
) -> dict[str, int]:
    """The number of rows in each state that occurs."""
    query = sa.select(table.c.status, sa.func.count()).group_by(table.c.status)
    if client_id is not None:
        query = query.where(table.c.client_id == client_id)
    return {row[0]: row[1] for row in connection.execute(query)}


def deployments_of(connection: sa.Connection, client_id: str) -> list[Row]:
    """The tenant's deployments that are not deleted, as rows with `DEPLOYMENT_COLUMNS`."""
    query = sa.select(*(deployments.c[name] for name in DEPLOYMENT_COLUMNS)).where(
        deployments.c.client_id == client_id, deployments.c.status != DeploymentStatus.DELETED
    )
    return fetch_all(connection, query)


def deployment_ids(connection: sa.Connection) -> set[str]:
    """The ids of all deployments that are not deleted."""
    query = sa.select(deployments.c.id).where(deployments.c.status != DeploymentStatus.DELETED)
    return set(connection.scalars(query))


def endpoints_of(connection: sa.Connection, client_id: str) -> list[Row]:
    """The tenant's endpoints that are not deleted, as rows with `id` and `members`."""
    query = sa.select(endpoints.c.id, endpoints.c.members).where(
        endpoints.c.client_id == client_id, endpoints.c.status != EndpointStatus.DELETED
    )
    return fetch_all(connection, query)


def webhook_backlogs(
    connection: sa.Connection, client_id: str | None = None
) -> list[WebhookBacklog]:
    """The backlog of every webhook, including empty ones."""
    is_pending = (deliveries.c.webhook_id == webhooks.c.id) & (
        deliveries.c.status == DeliveryStatus.PENDING
    )
    query = (
        sa.select(
            webhooks.c.id,
            webhooks.c.active,
            sa.func.count(deliveries.c.event_id),
            sa.func.min(deliveries.c.created_at),
        )
        .outerjoin(deliveries, is_pending)
        .group_by(webhooks.c.id, webhooks.c.active)
    )
    if client_id is not None:
        query = query.where(webhooks.c.client_id == client_id)
    return [WebhookBacklog(*row) for row in connection.execute(query)]
