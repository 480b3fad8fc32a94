"""The list of datasets."""

from dataclasses import dataclass

from tuneship.contract.common import Offset, Pagination
from tuneship.contract.datasets import DatasetSummary
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class DatasetsView:
    """One page of the list."""

    datasets: list[DatasetSummary]
    pages: Pagination


@page("/console/datasets", at=("Train", 2), name="Datasets")
async def datasets(client: PageClient, offset: Offset = 0) -> DatasetsView:
    """Newest first."""
    found = await client.datasets.list(limit=ROWS, offset=offset)
    return DatasetsView(found.datasets, found.pagination)
