"""Handlers of files: datasets, the result files of jobs, and the files of batches (`batch_files.py`)."""

import re
from typing import BinaryIO, Literal, cast

from tuneship.contract.datasets import DatasetStatus, DatasetUpload
from tuneship.contract.errors import DatasetError, ErrorDetail, PermissionDenied, ResourceNotFound
from tuneship.contract.lines.line_fields import format_of
from tuneship.contract.openai import files as contract
from tuneship.contract.openai.files import (
    FileDeleted,
    FileObject,
    FileObjects,
    FilePurpose,
    FileUpload,
)
from tuneship.contract.openai.ids import RESULT_FILE, job_of_result_file, own_id, shown_id
from tuneship.service.answers.downloads import Download
from tuneship.service.context.context import Context
from tuneship.service.datasets import handlers as datasets
from tuneship.service.datasets.lookup import own_dataset
from tuneship.service.datasets.reading import first_object
from tuneship.service.jobs.lookup import own_job
from tuneship.service.openai.batch_files import (
    batch_file_content,
    delete_batch_file,
    find_batch_file,
    list_batch_files,
    shown_file,
    upload_batch_file,
)
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.lists import page_behind
from tuneship.service.openai.result_files import has_result_file, result_content, result_file
from tuneship.store.database import tables
from tuneship.store.database.listings import DATASETS, JOBS
from tuneship.store.database.tables import DatasetRow, JobRow
from tuneship.store.files.blobs import StagedFile

NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9 ._-]")
STATES: dict[str, Literal["uploaded", "processed", "error"]] = {
    DatasetStatus.PROCESSING: "uploaded",
    DatasetStatus.PROCESSED: "processed",
    DatasetStatus.FAILED: "error",
}
# A result file shows that there is a job.
LISTS_JOBS = "jobs:read"
# The size of each takes some queries.
RESULTS_IN_A_PAGE = 100


@serves_openai(contract.openai_create_file, is_long=True)
def openai_create_file(context: Context, form: FileUpload, file: BinaryIO) -> FileObject:
    """Store the file: for a batch or an eval as it is, else as a dataset in the format of its first line."""
    name = NOT_IN_A_NAME.sub("_", form.filename).lstrip("._- ")[:128] or "training.jsonl"
    if form.purpose != "fine-tune":
        row = upload_batch_file(context, name, form.purpose, cast("StagedFile", file))
        context.audit_facts.created_id = row["id"]
        context.headers["Location"] = f"/openai/v1/files/{shown_id(row['id'])}"
        return shown_file(row)

    # The first line says in which format the file is; bad ones are refused later, with their places.
    with cast("StagedFile", file).open() as opened:
        number, fields = first_object(opened)
    if "preferred_output" in fields:
        text = "is not supported: preferences cannot be trained on"
        details = [ErrorDetail("preferred_output", "unsupported_parameter", text, line=number)]
        raise DatasetError(f"preferred_output {text}", param="file", details=details)
    form_of_lines = DatasetUpload(name=name, format=format_of(fields))
    made = datasets.upload_dataset(context, form_of_lines, file)
    # The main API's answer to a create names what was made; the record of a repeated request needs it.
    context.audit_facts.created_id = made.id
    context.headers["Location"] = f"/v1/datasets/{made.id}"
    return _shown(own_dataset(context, made.id))


@serves_openai(contract.openai_list_files)
def openai_list_files(
    context: Context,
    after: str | None = None,
    limit: int = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: FilePurpose = "fine-tune",
) -> FileObjects:
    """Return a page of datasets, of the results of completed jobs, or of files of batches."""
    is_rising = order == "asc"
    if purpose == "fine-tune":
        place = None if after is None else own_id(after)
        page, has_more = page_behind(context, DATASETS, [], place, limit, is_rising=is_rising)
        return FileObjects(data=[_shown(row) for row in page], has_more=has_more)

    if purpose != "fine-tune-results":
        return list_batch_files(context, after, limit, purpose, is_rising=is_rising)

    context.require(LISTS_JOBS)
    place = None if after is None else job_of_result_file(after) or after
    completed = [tables.jobs.c.completed_at.is_not(None)]
    most = min(limit, RESULTS_IN_A_PAGE)
    jobs, has_more = page_behind(context, JOBS, completed, place, most, is_rising=is_rising)
    context.touch(*jobs)
    found = [result_file(context, job) for job in jobs if has_result_file(job)]
    return FileObjects(data=found, has_more=has_more)


@serves_openai(contract.openai_get_file)
def openai_get_file(context: Context, file_id: str) -> FileObject:
    """Return one file."""
    job = _job_with_results(context, file_id)
    if job is not None:
        context.require(LISTS_JOBS)
        return result_file(context, job)
    row = find_batch_file(context, file_id)
    return _shown(own_dataset(context, file_id)) if row is None else shown_file(row)


@serves_openai(contract.openai_delete_file)
def openai_delete_file(context: Context, file_id: str) -> FileDeleted:
    """Delete a dataset as the main API does, or a file of a batch."""
    if file_id.startswith(RESULT_FILE):
        raise ResourceNotFound("a result file belongs to its job, and cannot be deleted")
    row = find_batch_file(context, file_id)
    if row is None:
        deleted = datasets.delete_dataset(context, file_id)
        return FileDeleted(id=shown_id(deleted.id))
    delete_batch_file(context, row)
    return FileDeleted(id=shown_id(row["id"]))


@serves_openai(contract.openai_get_file_content)
def openai_get_file_content(context: Context, file_id: str) -> bytes | Download:
    """Return the result file of a job, or the answers of a batch; what was uploaded stays in the service."""
    job = _job_with_results(context, file_id)
    if job is None:
        row = find_batch_file(context, file_id)
        if row is not None:
            return batch_file_content(context, row)
        own_dataset(context, file_id)
        raise PermissionDenied("Not allowed to download files of purpose: fine-tune")
    context.headers["Content-Type"] = "text/plain; charset=us-ascii"
    return result_content(context, job)


def _job_with_results(context: Context, file_id: str) -> JobRow | None:
    """The job whose result file this is; None for a file of training data. Raises `ResourceNotFound`."""
    job_id = job_of_result_file(file_id)
    if job_id is None:
        return None
    with context.read() as connection:
        job = own_job(context, job_id, connection)
    if not has_result_file(job):
        raise ResourceNotFound("the job has no result file")
    return job


def _shown(row: DatasetRow) -> FileObject:
    details = row["error"]["message"] if row["error"] else " ".join(row["suggestions"] or ())
    return FileObject(
        id=shown_id(row["id"]),
        bytes=row["bytes"],
        created_at=int(row["created_at"].timestamp()),
        filename=row["name"],
        purpose="fine-tune",
        status=STATES[row["status"]],
        status_details=details or None,
    )
