"""One dataset: its counts, what was wrong with it, and where it came from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

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
    return DatasetView(found, by_code(found.error.details if found.error else []))


def by_code(problems: Iterable[Any]) -> Sequence[tuple[str, list[Any]]]:
    """Problems of lines by their code, the most frequent first."""
    faults = sorted(problems, key=lambda one: one.code)
    grouped = [(code, list(same)) for code, same in groupby(faults, lambda one: one.code)]
    return sorted(grouped, key=lambda one: -len(one[1]))
