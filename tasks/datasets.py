"""Datasets: validate, upload, find, get, merge. One task is one call; next: `flows/release/data.py` joins them."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.create_once import CREATES, as_created, made_before, marks, once
from tuneship.contract import datasets
from tuneship.contract.datasets import (
    CONTENT_TAG,
    DatasetCreated,
    DatasetMerge,
    Datasets,
    DatasetStatus,
    DatasetUpload,
    DatasetValidate,
    DatasetValidation,
)
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.prefect.calls import RETRIES
from tuneship.prefect.connection import UPLOAD_DEADLINE_S, api
from tuneship.prefect.progress import bytes_of
from tuneship.prefect.tasks import task_of, task_of_pages


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="validate-{path.name}")
def validate_dataset(
    path: Path, dataset_format: DatasetFormat, base_model: str | None = None
) -> DatasetValidation:
    """Let the service check every line of a file; a bad file is an answer, not an error."""
    form = DatasetValidate(format=dataset_format, base_model=base_model)
    client = api(UPLOAD_DEADLINE_S).with_options(progress=bytes_of("validate"))
    with path.open("rb") as file:
        return client.datasets.validate(form, file)


list_datasets = task_of_pages(Datasets.iterate)


@task(**CREATES, task_run_name="upload-{path.name}")
def upload_dataset(path: Path, upload: DatasetUpload, run_key: str) -> DatasetCreated:
    """Upload a file. Refused whole when a line is bad."""
    content = [upload.name, upload.format, upload.tags.get(CONTENT_TAG)]
    with path.open("rb") as file:
        client = once(run_key, "upload", content, UPLOAD_DEADLINE_S)
        return client.with_options(progress=bytes_of("upload")).datasets.upload(upload, file)


get_dataset = task_of(datasets.get_dataset)


@task(**CREATES, task_run_name="merge-{merge.name}")
def merge_datasets(merge: DatasetMerge, run_key: str) -> DatasetCreated:
    """Concatenate datasets in the given order, once for this run; an earlier result is found by its tags."""
    create = (run_key, "merge", merge.dataset_ids)
    tags = marks(*create)
    for made in made_before(api().datasets.iterate(limit=100, tags=tags), tags):
        if made.status != DatasetStatus.FAILED:
            return as_created(DatasetCreated, api().datasets.get(made.id))
    return once(*create).datasets.merge(merge.model_copy(update={"tags": {**merge.tags, **tags}}))
