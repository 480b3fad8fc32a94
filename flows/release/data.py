"""Prepares the training data: validates all files, uploads those that the service does not have, merges them.

Nothing is uploaded while any file is bad. Next: `tasks/datasets.py`, one call each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from prefect import get_run_logger

from flows.forms.release_form import TrainingData
from flows.release.local_files import content_sha256, overlap
from flows.shared.errors import BadInput
from tasks.datasets import (
    get_dataset,
    list_datasets,
    merge_datasets,
    upload_dataset,
    validate_dataset,
)
from tuneship.contract.common import count
from tuneship.contract.datasets import CONTENT_TAG, DatasetMerge, DatasetStatus, DatasetUpload
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.prefect.progress import report
from tuneship.prefect.waits import wait_for_dataset

# Datasets that one merge of the service takes at most.
MAX_DATASETS_PER_MERGE = 100
# Share of the training rows that the service validates on when it is given no validation set.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Prepared:
    """The datasets of a job, and the facts about them that the gates and the record need."""

    dataset_id: str
    validation_dataset_id: str | None
    # Digest of every part of the training data, in order; the dataset id where there is no digest.
    content: tuple[str, ...]
    training_examples: int
    validation_examples: int
    # Number of validation rows that are in the training files too; None where the files are not here.
    duplicates: int | None


def resolve(data: TrainingData, *, may_be_empty: bool = False) -> TrainingData:
    """Name every file and dataset that globs and tags match. Raises `BadInput` where none does."""
    files: dict[str, None] = {}
    for name in data.files:
        # `glob` and not `Path.glob`: a pattern may be absolute.
        names = sorted(glob(name, recursive=True)) if has_magic(name) else [name]  # noqa: PTH207
        files |= dict.fromkeys(names)
    tagged = list_datasets(format=data.format, tags=data.dataset_tags) if data.dataset_tags else []
    # A merged dataset would bring its parts a second time. The service lists the newest first.
    usable = [
        dataset.id
        for dataset in reversed(tagged)
        if dataset.status == DatasetStatus.PROCESSED and not dataset.source_datasets
    ]
    dataset_ids = list(dict.fromkeys([*data.dataset_ids, *usable]))
    if not files and not dataset_ids and not may_be_empty:
        raise BadInput("data: no file and no dataset matches")
    named = data.model_copy(update={"files": list(files), "dataset_ids": dataset_ids})
    named.dataset_tags = {}
    return named


def is_tagged(dataset_id: str, data: TrainingData) -> bool:
    """Whether a dataset carries the tags of `data.dataset_tags`; never true for one that a merge created."""
    dataset = get_dataset(dataset_id)
    wanted = data.dataset_tags.items()
    return bool(wanted) and not dataset.source_datasets and wanted <= dataset.tags.items()


def validate_files(data: TrainingData, base_model: str | None) -> None:
    """Let the service check every file for a base model. Raises `BadInput` with line, field and code of each error."""
    files = [Path(file) for file in (*data.files, data.validation_file) if file]
    for file in files:
        if not file.is_file():
            raise BadInput(f"{file}: no such file")
    bad: list[str] = []
    for file in files:
        verdict = validate_dataset(file, data.format, base_model)
        wrong = verdict.error_count or len(verdict.errors)
        get_run_logger().info(
            "%s: %s, %s, %s",
            file.name,
            count(verdict.num_examples, "example"),
            count(verdict.total_tokens, "token"),
            "valid" if verdict.is_valid else count(wrong, "bad line"),
        )
        for suggestion in verdict.suggestions:
            get_run_logger().info("%s: %s", file.name, suggestion)
        if verdict.is_valid:
            continue
        for problem in verdict.errors:
            line = f"line {problem.line}" if problem.line is not None else "whole file"
            field = problem.field or "line"
            bad.append(f"{file}: {line}, {field}: {problem.code} ({problem.message})")
        if not verdict.errors:
            bad.append(f"{file}: is not valid")
    if bad:
        raise BadInput(
            f"the data was refused: {count(len(bad), 'problem')}; nothing was created", bad
        )


def upload_and_merge(data: TrainingData, name: str, run_key: str) -> Prepared:
    """Return one training dataset and, where given, one validation dataset."""
    files = [Path(file) for file in data.files]
    digests = {file: content_sha256(file) for file in files}
    uploaded = {
        uploaded_dataset(file, digest, data.format, run_key): digest
        for file, digest in digests.items()
    }
    parts = uploaded | {
        dataset_id: get_dataset(dataset_id).tags.get(CONTENT_TAG, dataset_id)
        for dataset_id in data.dataset_ids
    }
    dataset_id = _merged(list(parts), name, run_key)
    validation = Path(data.validation_file) if data.validation_file else None
    validation_id = data.validation_dataset_id
    if validation is not None:
        digest = content_sha256(validation)
        validation_id = uploaded_dataset(validation, digest, data.format, run_key)
    training = get_dataset(dataset_id).num_examples
    examples = (
        get_dataset(validation_id).num_examples
        if validation_id
        else int(VALIDATION_SHARE * training)
    )
    # The lines of a dataset are at the service only, and it compares none.
    at_hand = validation is not None and not data.dataset_ids
    return Prepared(
        dataset_id=dataset_id,
        validation_dataset_id=validation_id,
        content=tuple(parts.values()),
        training_examples=training,
        validation_examples=examples,
        duplicates=overlap(validation, files, data.format) if validation and at_hand else None,
    )


def uploaded_dataset(file: Path, digest: str, dataset_format: DatasetFormat, run_key: str) -> str:
    """The dataset with this file's content: one that the service has, or a new one."""
    for known in list_datasets(format=dataset_format, tags={CONTENT_TAG: digest}):
        if known.status == DatasetStatus.PROCESSED:
            get_run_logger().info("%s is dataset %s already", file.name, known.id)
            return known.id
    # A file may be called anything; the name of a dataset is limited to these characters.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-")[:120] or "dataset"
    upload = DatasetUpload(name=name, format=dataset_format, tags={CONTENT_TAG: digest})
    dataset_id = wait_for_dataset(upload_dataset(file, upload, run_key).id).id
    get_run_logger().info("%s is uploaded as %s", file.name, dataset_id)
    return dataset_id


def _merged(dataset_ids: Sequence[str], name: str, run_key: str) -> str:
    if len(dataset_ids) == 1:
        return dataset_ids[0]
    if len(dataset_ids) > MAX_DATASETS_PER_MERGE:
        batches = [
            dataset_ids[start : start + MAX_DATASETS_PER_MERGE]
            for start in range(0, len(dataset_ids), MAX_DATASETS_PER_MERGE)
        ]
        return _merged([_merged(batch, name, run_key) for batch in batches], name, run_key)
    merge = DatasetMerge(dataset_ids=list(dataset_ids), name=f"{name} training data")
    report("combine", 0, 0)
    merged = wait_for_dataset(merge_datasets(merge, run_key).id)
    get_run_logger().info(
        "%d datasets are combined in %s: %s",
        len(dataset_ids),
        merged.id,
        count(merged.num_examples, "example"),
    )
    return merged.id
