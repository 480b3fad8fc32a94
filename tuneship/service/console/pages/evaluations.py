"""The list of evaluations."""

from dataclasses import dataclass

from tuneship.contract.common import Offset, Pagination
from tuneship.contract.evaluations import EvaluationSummary
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class EvaluationsView:
    """One page of the list."""

    evaluations: list[EvaluationSummary]
    pages: Pagination


@page("/console/evaluations", at=("Train", 4), name="Evaluations")
async def evaluations(client: PageClient, offset: Offset = 0) -> EvaluationsView:
    """Newest first."""
    found = await client.evaluations.list(limit=ROWS, offset=offset)
    return EvaluationsView(found.evaluations, found.pagination)
