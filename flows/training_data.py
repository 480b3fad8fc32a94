"""From files to one dataset: validate all of them first, then upload what the service does not have, then merge.

Nothing is uploaded while any file is bad. Next: `tasks/datasets.py`, one call each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger

from flows.parameters import TrainingData
from flows.refusals import BadInput
from flows.rows import content_sha256, overlap
from tasks.datasets import (
    CONTENT_TAG,
    find_datasets,
    get_dataset,
    merge_datasets,
    upload_dataset,
    validate_dataset,
)
from tuneship.contract.datasets import DatasetMerge, DatasetStatus, DatasetUpload, LineProblem
from tuneship.contract.examples import DatasetFormat

CARVED_OUT = 0.1
"""Share of the training rows that the service validates on when it is given no validation set."""


@dataclass(frozen=True)
class Prepared:
    """What a job needs, and what the gates and the record must know of it."""

    dataset_id: str
    validation_dataset_id: str | None
    content: tuple[str, ...]
    """Digest of every part of the training data, in order; the dataset id where there is no digest."""
    validation_examples: int
    duplicates: int | None
    """Validation rows that stand in the training files; None where the files are not at hand."""


def validate_files(data: TrainingData) -> None:
    """Let the service check every file. Raises `BadInput` naming line, field and code of what is wrong."""
    files = [Path(file) for file in (*data.files, data.validation_file) if file]
    for file in files:
        if not file.is_file():
            raise BadInput(f"{file}: no such file")
    bad = [problem for file in files for problem in _problems(file, data.format)]
    if bad:
        raise BadInput(f"the data was refused: {len(bad)} problem(s); nothing was created", bad)


def upload_and_merge(data: TrainingData, name: str, run_key: str) -> Prepared:
    """One training dataset and, where given, one validation dataset."""
    files = [Path(file) for file in data.files]
    uploaded = {_dataset_of(file, data.format, run_key): content_sha256(file) for file in files}
    parts = uploaded | {dataset_id: _content(dataset_id) for dataset_id in data.dataset_ids}
    dataset_id = _merged(list(parts), name, run_key)
    validation = Path(data.validation_file) if data.validation_file else None
    validation_id = data.validation_dataset_id
    if validation is not None:
        validation_id = _dataset_of(validation, data.format, run_key)
    examples = (
        get_dataset(validation_id).num_examples
        if validation_id
        else int(CARVED_OUT * get_dataset(dataset_id).num_examples)
    )
    at_hand = validation is not None and not data.dataset_ids
    return Prepared(
        dataset_id=dataset_id,
        validation_dataset_id=validation_id,
        content=tuple(parts.values()),
        validation_examples=examples,
        duplicates=overlap(validation, files, data.format) if validation and at_hand else None,
    )


def _problems(file: Path, dataset_format: DatasetFormat) -> list[str]:
    verdict = validate_dataset(file, dataset_format)
    get_run_logger().info(
        "%s: %d examples, %d tokens, %s",
        file.name,
        verdict.num_examples,
        verdict.total_tokens,
        "valid" if verdict.is_valid else f"{verdict.error_count or len(verdict.errors)} bad lines",
    )
    if verdict.is_valid:
        return []
    return [_told(file, problem) for problem in verdict.errors] or [f"{file}: is not valid"]


def _told(file: Path, problem: LineProblem) -> str:
    line = f"line {problem.line}" if problem.line is not None else "whole file"
    field = problem.field or "line"
    return f"{file}: {line}, {field}: {problem.code} ({problem.message})"


def _dataset_of(file: Path, dataset_format: DatasetFormat, run_key: str) -> str:
    """The dataset with this file's content: one that the service has, or a new one."""
    digest = content_sha256(file)
    for known in find_datasets(digest, dataset_format):
        if known.status == DatasetStatus.PROCESSED:
            get_run_logger().info("%s is dataset %s already", file.name, known.id)
            return known.id
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-")[:120] or "dataset"
    upload = DatasetUpload(name=name, format=dataset_format, tags={CONTENT_TAG: digest})
    dataset_id = upload_dataset(file, upload, run_key).id
    get_run_logger().info("%s is uploaded as %s", file.name, dataset_id)
    return dataset_id


def _content(dataset_id: str) -> str:
    return get_dataset(dataset_id).tags.get(CONTENT_TAG, dataset_id)


def _merged(dataset_ids: Sequence[str], name: str, run_key: str) -> str:
    if len(dataset_ids) == 1:
        return dataset_ids[0]
    merge = DatasetMerge(dataset_ids=list(dataset_ids), name=f"{name} training data")
    merged = merge_datasets(merge, run_key)
    get_run_logger().info(
        "%d datasets are merged into %s: %d examples",
        len(dataset_ids),
        merged.id,
        merged.num_examples,
    )
    return merged.id
