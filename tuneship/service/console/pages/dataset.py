"""One dataset: its counts, what was wrong with it, and where it came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tuneship.contract.common import DatasetId
from tuneship.contract.datasets import Dataset, LineProblem
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient


@dataclass(frozen=True)
class DatasetView:
    """A dataset, with the faults of its lines by code, the most frequent first."""

    dataset: Dataset
    problems: Sequence[tuple[str, list[LineProblem]]]


@page("/console/datasets/{dataset_id}")
async def dataset(client: PageClient, dataset_id: DatasetId) -> DatasetView:
    """Its lines are shown nowhere."""
    found = await client.datasets.get(dataset_id)
    faults = sorted(found.error.details if found.error else [], key=lambda one: one.code)
    grouped = [(code, list(same)) for code, same in groupby(faults, lambda one: one.code)]
    return DatasetView(found, sorted(grouped, key=lambda one: -len(one[1])))
