"""Files of batches and of evals, as they came. Sealed and counted like datasets; `file-<x>` is `file_<x>`."""

from datetime import datetime
from typing import Any, BinaryIO, Literal

import sqlalchemy as sa

from tuneship.contract.errors import (
    DatasetError,
    InvalidRequestError,
    PermissionDenied,
    ResourceNotFound,
)
from tuneship.contract.openai.batches import MAXIMUM_FILE_BYTES
from tuneship.contract.openai.files import FileObject, FileObjects
from tuneship.contract.openai.ids import batch_file_of, own_id, shown_id
from tuneship.security.sealed_files import open_plain
from tuneship.service.access.data_keys import Keyring
from tuneship.service.answers.downloads import FileDownload
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_bytes, check_quota
from tuneship.service.context.uploaded_files import keep_file
from tuneship.service.openai.lists import page_behind
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import BATCH_FILES
from tuneship.store.database.tables import BatchFileRow
from tuneship.store.files.blobs import DATA_FILE, Blobs, StagedFile
from tuneship.store.files.stored_files import dataset_file
from tuneship.store.records import batch_records
from tuneship.store.records.batch_records import EVAL_ROWS, INPUT, OUTPUT

NO_SAFEGUARDS = {"audit_logging": False, "compliance_mode": "none"}


def new_file(client_id: str, name: str, purpose: str, now: datetime) -> dict[str, Any]:
    """The row of a file that is not stored yet."""
    file_id = new_id("file")
    return {
        "id": file_id,
        "client_id": client_id,
        "created_at": now,
        "updated_at": now,
        "tags": {},
        "name": name,
        "purpose": purpose,
        "position": 0,
        "blob": f"{object_of(file_id)}/{DATA_FILE}",
        "came_safely": True,
        "security_settings": NO_SAFEGUARDS,
    }


def object_of(file_id: str) -> str:
    """The folder of a file, which is also the name of its data key."""
    return f"files/{file_id}"


def insert_file(
    keyring: Keyring, connection: sa.Connection, row: dict[str, Any], staged: StagedFile
) -> BatchFileRow:
    """Insert the row of a file whose blob is stored, with its key."""
    row = {**row, "sha256": staged.sha256, "bytes": staged.size}
    stored = rows.insert(connection, tables.batch_files, row)
    keyring.add(connection, row["client_id"], object_of(row["id"]), staged.key, row["created_at"])
    return stored


def upload_batch_file(
    context: Context, name: str, purpose: str, staged: StagedFile
) -> BatchFileRow:
    """Store a file of requests, or of an eval's rows, as it is. Raises the refusals of quotas."""
    if staged.size > MAXIMUM_FILE_BYTES:
        text = f"the file is larger than {MAXIMUM_FILE_BYTES >> 20} MiB"
        raise InvalidRequestError(text, param="file", status=413)
    row = new_file(context.client_id, name, purpose, context.now)
    row["came_safely"] = context.caller.is_safe
    keep_file(context, tables.batch_files, row, staged)
    most = context.parts.settings.maximum_datasets
    is_uploaded = tables.batch_files.c.purpose.in_((INPUT, EVAL_ROWS))
    check_quota(context, tables.batch_files, most, "files for batches and evals", is_uploaded)
    check_bytes(context, staged.size)
    return insert_file(context.parts.keyring, context.transaction, row, staged)


def find_batch_file(context: Context, file_id: str) -> BatchFileRow | None:
    """The caller's file of a batch, by the id in a request; None where there is none. Parts are nobody's to see."""
    with context.read() as connection:
        row = rows.fetch(
            connection, tables.batch_files, batch_file_of(file_id), client_id=context.client_id
        )
    if row is None or row["purpose"] not in (INPUT, OUTPUT, EVAL_ROWS):
        return None
    context.audit_facts.path_id = row["id"]
    context.touch(row)
    return row


def list_batch_files(
    context: Context,
    after: str | None,
    limit: int,
    purpose: Literal["batch", "batch_output", "evals"],
    *,
    is_rising: bool,
) -> FileObjects:
    """A page of the files of one purpose."""
    place = None if after is None else batch_file_of(own_id(after))
    of_purpose = [tables.batch_files.c.purpose == purpose]
    page, has_more = page_behind(
        context, BATCH_FILES, of_purpose, place, limit, is_rising=is_rising
    )
    context.touch(*page)
    return FileObjects(data=[shown_file(row) for row in page], has_more=has_more)


def delete_batch_file(context: Context, row: BatchFileRow) -> None:
    """Remove row and key in the transaction, and the blob after it."""
    connection, parts = context.transaction, context.parts
    if batch_records.is_input_needed(connection, row["id"]):
        raise DatasetError("a batch that has not ended uses the file", status=409)
    rows.remove(connection, tables.batch_files, row["id"])
    parts.keyring.destroy(connection, object_of(row["id"]))
    context.after_commit.append(lambda: parts.blobs.delete(object_of(row["id"])))


def batch_file_content(context: Context, row: BatchFileRow) -> FileDownload:
    """The answers of a batch, for a key that may ask models itself. Raises `PermissionDenied`."""
    if row["purpose"] != OUTPUT:
        raise PermissionDenied(f"Not allowed to download files of purpose: {row['purpose']}")
    context.require("generate")  # nobody else reads what a model wrote
    parts = context.parts
    try:
        content = open_batch_file(parts.database, parts.keyring, parts.blobs, row)
        return FileDownload(content, row["name"], row["bytes"])
    except FileNotFoundError:
        raise ResourceNotFound("the content of the file is missing") from None


def open_batch_file(
    database: Database, keyring: Keyring, blobs: Blobs, row: BatchFileRow
) -> BinaryIO:
    """Open the plain bytes of a file, which may be deleted meanwhile. Raises `OSError` and `BlobsAway`."""
    with database.read() as connection:
        key = keyring.find(connection, row["client_id"], object_of(row["id"]))
    with dataset_file(blobs, row) as path:
        return open_plain(path, key)


def shown_file(row: BatchFileRow) -> FileObject:
    """The file as OpenAI's clients see it."""
    return FileObject.model_validate(
        {
            "id": shown_id(row["id"]),
            "bytes": row["bytes"],
            "created_at": int(row["created_at"].timestamp()),
            "filename": row["name"],
            "purpose": row["purpose"],
            "status": "processed",
        }
    )
