"""Makes a dataset from a staged file: reads, counts, stores and announces it."""

from typing import Any, Final

import sqlalchemy as sa

from tuneship.contract.datasets import DatasetMerge, DatasetStatus, DatasetUpload
from tuneship.contract.errors import DatasetError, ErrorDetail, InternalError
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_bytes, check_quota
from tuneship.service.context.uploaded_files import keep_file
from tuneship.service.datasets.lookup import object_of
from tuneship.service.datasets.reading import DatasetReading, Plan, ReadingStopped, read_dataset
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import DatasetRow
from tuneship.store.files.blobs import DATA_FILE, StagedFile
from tuneship.store.records.outbox import emit

# Columns that a reading fills, and as they are before it.
COUNTS: Final = ("num_examples", "prompt_tokens", "response_tokens")
UNCOUNTED: dict[str, int] = dict.fromkeys(COUNTS, 0)


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


def announce(connection: sa.Connection, row: Row, now: Any) -> None:
    """Emit the event that a dataset is ready."""
    known = {name: row[name] for name in COUNTS}
    emit(connection, "dataset.processed", row, now, status=DatasetStatus.PROCESSED, **known)


def fields(row: DatasetRow) -> dict[str, Any]:
    """A row with the token total that answers have."""
    return {**row, "total_tokens": row["prompt_tokens"] + row["response_tokens"]}
