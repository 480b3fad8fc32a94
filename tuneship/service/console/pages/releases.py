"""The list of releases."""

from dataclasses import dataclass

from tuneship.contract.common import AnyEndpointId, Offset, Pagination
from tuneship.contract.releases import Release, ReleaseStatus
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class ReleasesView:
    """One page of the list, and how it is filtered."""

    releases: list[Release]
    pages: Pagination
    status: ReleaseStatus | None
    endpoint_id: str | None
    statuses: tuple[str, ...] = tuple(ReleaseStatus)


@page("/console/releases", at=("Ship", 1), name="Releases")
async def releases(
    client: PageClient,
    offset: Offset = 0,
    status: ReleaseStatus | None = None,
    endpoint_id: AnyEndpointId | None = None,
) -> ReleasesView:
    """Newest first."""
    found = await client.releases.list(
        limit=ROWS, offset=offset, status=status, endpoint_id=endpoint_id
    )
    return ReleasesView(found.releases, found.pagination, status, endpoint_id)
