"""Uploads a dataset, or checks a file without storing it; both show what is wrong with its lines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.service.console.forms import Choices
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient
from tuneship.service.console.pages.dataset import by_code
from tuneship.service.console.pages.new_job import base_models


@dataclass(frozen=True)
class NewDatasetView:
    """The choices of the form."""

    formats: Choices
    # Those whose tokenizers can count.
    base_models: Choices

    def by_code(self, problems: Iterable[Any]) -> Sequence[tuple[str, Sequence[Any]]]:
        """Problems of lines, the most frequent first."""
        return by_code(problems)


@page("/console/datasets/new", is_live=False)
async def new_dataset(client: PageClient) -> NewDatasetView:
    """The file goes to the service as it is read."""
    return NewDatasetView(
        [(one, one) for one in get_args(DatasetFormat)], await base_models(client)
    )
