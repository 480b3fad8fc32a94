"""The list of models: base models, then tuned ones."""

from dataclasses import dataclass

from tuneship.contract.common import ModelId, Offset, Pagination
from tuneship.contract.models import Model
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class ModelsView:
    """One page of the list, and how it is filtered."""

    models: list[Model]
    pages: Pagination | None
    base_model: str | None


@page("/console/models", at=("Train", 3), name="Models")
async def models(
    client: PageClient, offset: Offset = 0, base_model: ModelId | None = None
) -> ModelsView:
    """Base models by id, then tuned ones, newest first."""
    found = await client.models.list(limit=ROWS, offset=offset, base_model=base_model)
    return ModelsView(found.models, found.pagination, base_model)
