"""The lists of endpoints: canary endpoints, whose traffic is split, and plain ones."""

from dataclasses import dataclass

from tuneship.contract.common import Offset, Pagination
from tuneship.contract.endpoints import CanaryEndpoint, Endpoint
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class EndpointsView:
    """All canary endpoints, of which there are few, and one page of plain ones."""

    canaries: list[CanaryEndpoint]
    endpoints: list[Endpoint]
    pages: Pagination


@page("/console/endpoints", at=("Ship", 2), name="Endpoints")
async def endpoints(client: PageClient, offset: Offset = 0) -> EndpointsView:
    """Newest first."""
    plain = await client.endpoints.list(limit=ROWS, offset=offset)
    split = await client.canary_endpoints.list(limit=100)
    return EndpointsView(split.canary_endpoints, plain.endpoints, plain.pagination)
