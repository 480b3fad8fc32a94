"""Finds the data that the last successful release was not trained on: by content where known, else by time.

The last success is a promoted release of this pipeline on that endpoint; without one, the training of the model that
serves now. Next: `flows/retrain.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flows.forms.release_form import EndpointChoice, TrainingData
from flows.release.champion import SplitIsShared, find_champion, find_endpoint
from flows.release.local_files import content_sha256
from flows.release.record_file import ReleaseRecords
from tasks.datasets import get_dataset
from tasks.jobs import get_job
from tuneship.client import ApiError
from tuneship.contract.datasets import CONTENT_TAG
from tuneship.prefect.connection import service_name


@dataclass(frozen=True)
class Success:
    """The last release that was promoted. `content` is None where only its time is known."""

    at: datetime
    content: frozenset[str] | None


@dataclass(frozen=True)
class Part:
    """One part of the training data: a file or a dataset."""

    file: str | None
    dataset_id: str | None
    # The digest of a file; the id of a dataset, and the digest of its file where it has one.
    content: frozenset[str]
    since: datetime
    examples: int


def parts_of(data: TrainingData) -> list[Part]:
    """Describe every file and dataset of the training data. Raises `BadInput` for a file that cannot be read."""
    parts: list[Part] = []
    for name in data.files:
        file = Path(name)
        content = content_sha256(file)
        with file.open("rb") as lines:
            examples = sum(1 for line in lines if line.strip())
        since = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        parts.append(Part(name, None, frozenset({content}), since, examples))
    for dataset_id in data.dataset_ids:
        dataset = get_dataset(dataset_id)
        known_by = frozenset({dataset_id, dataset.tags.get(CONTENT_TAG, dataset_id)})
        parts.append(Part(None, dataset_id, known_by, dataset.created_at, dataset.num_examples))
    return parts


def new_parts(parts: Sequence[Part], success: Success | None) -> list[Part]:
    """The parts that the last success was not trained on; all of them where there was none."""
    if success is None:
        return list(parts)
    if success.content is None:
        return [part for part in parts if part.since > success.at]
    return [part for part in parts if not part.content & success.content]


def last_success(endpoint: EndpointChoice, records: Path) -> Success | None:
    """The newest promoted release that trained for this endpoint; None where no tuned model serves there."""
    found = find_endpoint(endpoint)
    names = {endpoint.id, endpoint.name, *((found.id, found.name) if found else ())} - {None}
    promoted: list[Success] = []
    for record in ReleaseRecords(records):
        begun, made, ended = record.last("begun"), record.last("job"), record.last("ended")
        if begun is None or made is None or ended is None or ended["outcome"] != "promoted":
            continue
        # A release names its endpoint by its id, its name, or both.
        is_of_endpoint = not names.isdisjoint({begun["endpoint_id"], begun["endpoint_name"]})
        if is_of_endpoint and begun.get("service") == service_name():
            at = datetime.fromisoformat(ended["at"])
            promoted.append(Success(at, frozenset(made["content"])))
    if promoted:
        return max(promoted, key=lambda one: one.at)
    try:
        champion = find_champion(endpoint)
    except SplitIsShared:  # the chain will say so
        return None
    if champion is None or not champion.model.startswith("ft:"):
        return None
    try:
        trained = get_job(f"ft_{champion.model.rsplit(':', 1)[1]}").created_at
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return Success(trained, None)
