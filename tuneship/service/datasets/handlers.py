"""Handlers of datasets: validate, upload, show, list, delete. Merging is in `merging.py`.

A file is read by `reading.py`, a big one later by `processing.py`. It is accepted whole or not at all.
"""

from functools import partial
from typing import Any, BinaryIO, Final

import sqlalchemy as sa

from tuneship.contract import datasets as contract
from tuneship.contract.common import Deleted
from tuneship.contract.dataset_lines import DatasetFormat
from tuneship.contract.datasets import (
    Dataset,
    DatasetCreated,
    DatasetMerge,
    DatasetPage,
    DatasetStatus,
    DatasetSummary,
    DatasetUpload,
    DatasetValidate,
    DatasetValidation,
    FormatDetails,
    TokenDistribution,
)
from tuneship.contract.errors import (
    DatasetError,
    ErrorDetail,
    InternalError,
    ModelNotFound,
    ResourceNotFound,
)
from tuneship.service.catalogues.base_models import CataloguedModel, CatalogueFault
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context, Parts
from tuneship.service.context.lists import own_page
from tuneship.service.context.quotas import check_bytes, check_quota
from tuneship.service.datasets.advice import suggestions
from tuneship.service.datasets.reading import DatasetReading, Plan, ReadingStopped, read_dataset
from tuneship.service.models.handlers import base_of
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import DATASETS
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import DatasetRow
from tuneship.store.files.blobs import DATA_FILE, BlobsAway, StagedFile
from tuneship.store.records import evaluation_records, job_records
from tuneship.store.records.outbox import emit

# Columns that a reading fills, and as they are before it.
COUNTS: Final = ("num_examples", "prompt_tokens", "response_tokens")
UNCOUNTED: dict[str, int] = dict.fromkeys(COUNTS, 0)


@serves(contract.validate_dataset, own_threads="validations")
def validate_dataset(context: Context, form: DatasetValidate, file: BinaryIO) -> DatasetValidation:
    """Read the file and report its problems; nothing is stored."""
    base = _counting_model(context, form.base_model)
    is_rendered = form.base_model is not None
    reading = read_now(context, _staged(file), form.format, base, is_rendered=is_rendered)
    return DatasetValidation(
        is_valid=reading.error_count == 0,
        num_examples=reading.num_examples,
        total_tokens=reading.prompt_tokens + reading.response_tokens,
        token_distribution=TokenDistribution(
            prompt_tokens=reading.prompt_tokens, response_tokens=reading.response_tokens
        ),
        format_details=FormatDetails(
            format=form.format,
            has_instructions=reading.has_instructions,
            has_responses=reading.num_examples > 0,  # every good example has one
        ),
        suggestions=suggestions(reading),
        errors=reading.errors,
        warnings=reading.warnings,
        error_count=reading.error_count,
        errors_truncated=reading.error_count > len(reading.errors),
        warning_count=reading.warning_count,
        tokenizer=base.id,
    )


@serves(contract.upload_dataset, is_long=True)
def upload_dataset(context: Context, form: DatasetUpload, file: BinaryIO) -> DatasetCreated:
    """Check a small file now and a big one later; a bad line refuses the whole file."""
    staged = _staged(file)
    base = _counting_model(context, form.base_model)
    row = new_row(context, form) | {"format": form.format, "tokenizer": base.id}
    if is_big(context, staged):
        row |= {"status": DatasetStatus.PROCESSING, **UNCOUNTED}
    else:
        reading = read_now(context, staged, form.format, base)
        refuse_errors(reading)
        row |= {"status": DatasetStatus.PROCESSED, **counts(reading)}
        row["suggestions"] = suggestions(reading) or None
    return DatasetCreated(**store(context, row, staged))


def _counting_model(context: Context, identifier: str | None) -> CataloguedModel:
    if identifier is None:
        return context.parts.catalogue.default
    base = base_of(context.parts, identifier, "base_model")
    try:
        _ = base.tokenizer, base.text_format.template
    except CatalogueFault as fault:
        text = f"base_model names a base model whose files cannot be used: {fault}"
        raise ModelNotFound(text, param="base_model") from None
    return base


def _staged(file: BinaryIO) -> StagedFile:
    if not isinstance(file, StagedFile):
        raise TypeError("the HTTP boundary stages a form's file before its handler runs")
    return file


def is_big(context: Context, staged: StagedFile) -> bool:
    """Whether reading the file takes longer than a caller should wait."""
    return staged.size > context.parts.settings.inline_dataset_bytes


def read_now(
    context: Context,
    staged: StagedFile,
    dataset_format: DatasetFormat,
    base: CataloguedModel | None,
    *,
    is_rendered: bool = False,
) -> DatasetReading:
    """Read a file while its caller waits. Raises `InternalError` (503) when the service shuts down meanwhile."""

    def is_halted() -> bool:
        return context.parts.halted.is_set() or context.left.is_set()

    plan = Plan(dataset_format, base, is_halted, is_rendered=is_rendered)
    try:
        with staged.open() as file:
            return read_dataset(file, staged.size, plan)
    except ReadingStopped:
        text = "the service is shutting down"
        raise InternalError(text, status=503, retry_after=1) from None


def refuse_errors(reading: DatasetReading) -> None:
    """Raise `DatasetError` with the problems that `validate_dataset` would report."""
    if reading.error_count == 0:
        return
    details = [
        ErrorDetail(one.field, one.code, one.message, line=one.line) for one in reading.errors
    ]
    raise DatasetError(verdict(reading), param="file", details=details)


def verdict(reading: DatasetReading) -> str:
    """Describe a bad file in one sentence: the number of problems, and the first one."""
    first = reading.errors[0]
    where = "the file" if first.line is None else f"line {first.line}"
    number = reading.error_count
    problems = "1 problem" if number == 1 else f"{number} problems; the first"
    return f"the dataset has {problems}: {where}: {first.field or 'it'} {first.message}"


def counts(reading: DatasetReading) -> dict[str, int]:
    """The values of the columns that a reading fills."""
    return {name: getattr(reading, name) for name in COUNTS}


def new_row(context: Context, form: DatasetUpload | DatasetMerge) -> dict[str, Any]:
    """The columns that uploaded and merged datasets have in common."""
    dataset_id = new_id("ds")
    return {
        "id": dataset_id,
        "client_id": context.client_id,
        "name": form.name,
        "description": form.description,
        "tags": form.tags,
        "created_at": context.now,
        "updated_at": context.now,
        "blob": f"datasets/{dataset_id}/{DATA_FILE}",
        "came_safely": context.caller.is_safe,
    }


def store(context: Context, row: Row, staged: StagedFile) -> dict[str, Any]:
    """Store the file, then its row; return the row as it is shown.

    A file that a kill leaves without a row is set aside later.
    """
    keep_file(context, tables.datasets, row, staged)
    check_quota(context, tables.datasets, context.parts.settings.maximum_datasets, "datasets")
    check_bytes(context, staged.size)
    row = {**row, "sha256": staged.sha256, "bytes": staged.size}
    stored = rows.insert(context.transaction, tables.datasets, row)
    context.parts.keyring.add(
        context.transaction, context.client_id, object_of(row), staged.key, context.now
    )
    emit(context.transaction, "dataset.uploaded", stored, context.now, status="uploaded")
    if stored["status"] == DatasetStatus.PROCESSED:
        announce(context.transaction, stored, context.now)
    return fields(stored)


def keep_file(context: Context, table: sa.Table, row: Row, staged: StagedFile) -> None:
    """Store an uploaded file as the blob of a row that the request is going to insert into `table`."""
    undo = partial(remove_unless_stored, context.parts, table, row)
    context.after_rollback.append(undo)
    try:
        # Before the transaction, for which other writers would wait.
        context.parts.blobs.keep(staged, row["blob"])
    except BlobsAway:
        # The removal would wait for the same store; the supervisor finds what the upload may have left.
        context.after_rollback.remove(undo)
        raise


def remove_unless_stored(parts: Parts, table: sa.Table, row: Row) -> None:
    """Remove a file without a row. A commit that failed may have succeeded, so the row is looked for."""
    # A transaction for writing waits for the tenant's commit that the database has not ended yet.
    with parts.database.write(row["client_id"]) as connection:
        is_stored = rows.count(connection, table, table.c.id == row["id"]) > 0
    if not is_stored:
        parts.blobs.delete(str(row["blob"]).rpartition("/")[0])


def object_of(row: Row) -> str:
    """The folder of a dataset's file, which is also the name of its data key."""
    return f"datasets/{row['id']}"


def announce(connection: sa.Connection, row: Row, now: Any) -> None:
    """Emit the event that a dataset is ready."""
    known = {name: row[name] for name in COUNTS}
    emit(connection, "dataset.processed", row, now, status=DatasetStatus.PROCESSED, **known)


def fields(row: DatasetRow) -> dict[str, Any]:
    """A row with the token total that answers have."""
    return {**row, "total_tokens": row["prompt_tokens"] + row["response_tokens"]}


def own_dataset(context: Context, dataset_id: str, param: str | None = None) -> DatasetRow:
    """The caller's dataset. Raises `ResourceNotFound`, for a missing one and for another tenant's alike."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.datasets, dataset_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such dataset", param=param)
    return row


@serves(contract.get_dataset)
def get_dataset(context: Context, dataset_id: str) -> Dataset:
    """Return the dataset with its token distribution."""
    row = own_dataset(context, dataset_id)
    return Dataset(
        **fields(row),
        token_distribution=TokenDistribution(
            prompt_tokens=row["prompt_tokens"], response_tokens=row["response_tokens"]
        ),
    )


@serves(contract.list_datasets)
def list_datasets(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    format: DatasetFormat | None = None,  # noqa: A002 - the description's name
    tags: dict[str, str] | None = None,
) -> DatasetPage:
    """Return a page of the caller's datasets, newest first."""
    filters = rows.filters_of(tables.datasets, tags, format=format)
    page = own_page(context, DATASETS, filters, limit, offset)
    datasets = [DatasetSummary(**fields(row)) for row in page.rows]
    return DatasetPage(datasets=datasets, pagination=page.pagination)


@serves(contract.delete_dataset)
def delete_dataset(context: Context, dataset_id: str) -> Deleted:
    """Remove row and key in the transaction, and the file after it.

    A file that a kill leaves behind is set aside later.
    """
    connection = context.transaction
    row = own_dataset(context, dataset_id)
    if job_records.is_dataset_needed(connection, dataset_id):
        raise DatasetError("a job that has not ended uses the dataset", status=409)
    if evaluation_records.is_dataset_needed(connection, dataset_id):
        raise DatasetError("an evaluation that has not ended uses the dataset", status=409)
    rows.remove(connection, tables.datasets, dataset_id)
    context.parts.keyring.destroy(connection, object_of(row))
    context.after_commit.append(lambda: context.parts.blobs.delete(object_of(row)))
    return Deleted(id=dataset_id)
