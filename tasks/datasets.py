"""Datasets: validate, upload, find, get, merge. One task is one call; next: `flows/training_data.py` joins them."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tasks.creates import CREATES, once
from tuneship.contract.datasets import (
    Dataset,
    DatasetCreated,
    DatasetMerge,
    DatasetSummary,
    DatasetUpload,
    DatasetValidate,
    DatasetValidation,
)
from tuneship.contract.examples import DatasetFormat

CONTENT_TAG = "content_sha256"
"""Tag with the SHA-256 of the file, so that the same file is one dataset in every release."""


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="validate-{path.name}")
def validate_dataset(path: Path, dataset_format: DatasetFormat) -> DatasetValidation:
    """Let the service check every line of a file; a bad file is an answer, not an error."""
    with path.open("rb") as file:
        return api().datasets.validate(DatasetValidate(format=dataset_format), file)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="find-dataset-{dataset_format}")
def find_datasets(content_sha256: str, dataset_format: DatasetFormat) -> list[DatasetSummary]:
    """Datasets made from a file with this digest, newest first."""
    tags = {CONTENT_TAG: content_sha256}
    return api().datasets.list(format=dataset_format, tags=tags).datasets


@task(**CREATES, task_run_name="upload-{path.name}")
def upload_dataset(path: Path, upload: DatasetUpload, run_key: str) -> DatasetCreated:
    """Upload a file. Refused whole when a line is bad."""
    content = [upload.name, upload.format, upload.tags.get(CONTENT_TAG)]
    with path.open("rb") as file:
        return once(run_key, "upload", content).datasets.upload(upload, file)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-{dataset_id}")
def get_dataset(dataset_id: str) -> Dataset:
    """Fetch a dataset's record."""
    return api().datasets.get(dataset_id)


@task(**CREATES, task_run_name="merge-{merge.name}")
def merge_datasets(merge: DatasetMerge, run_key: str) -> DatasetCreated:
    """Concatenate datasets in the given order."""
    return once(run_key, "merge", merge.dataset_ids).datasets.merge(merge)
