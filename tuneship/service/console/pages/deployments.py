"""The list of deployments."""

from dataclasses import dataclass

from tuneship.contract.common import Offset, Pagination
from tuneship.contract.deployments import DeploymentListItem, DeploymentStatus
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class DeploymentsView:
    """One page of the list, and how it is filtered."""

    deployments: list[DeploymentListItem]
    pages: Pagination | None
    status: DeploymentStatus | None
    statuses: tuple[str, ...] = tuple(DeploymentStatus)


@page("/console/deployments", at=("Ship", 3), name="Deployments")
async def deployments(
    client: PageClient, offset: Offset = 0, status: DeploymentStatus | None = None
) -> DeploymentsView:
    """Newest first."""
    found = await client.deployments.list(limit=ROWS, offset=offset, status=status)
    return DeploymentsView(found.deployments, found.pagination, status)
