"""Handlers of batches: they change records and states; `tuneship/service/batches/` answers the requests."""

from datetime import datetime, timedelta

from tuneship.contract.errors import InvalidRequestError, ResourceNotFound
from tuneship.contract.openai import batches as contract
from tuneship.contract.openai.batches import (
    OPEN,
    BatchCreate,
    BatchObject,
    BatchObjects,
    BatchStatus,
)
from tuneship.contract.openai.ids import shown_id
from tuneship.service.background_requests.answering import kept_caller
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_bytes, check_quota
from tuneship.service.datasets.lookup import own_dataset
from tuneship.service.openai.batch_files import NO_SAFEGUARDS, find_batch_file
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.errors import INVALID, OpenAIError
from tuneship.service.openai.lists import page_behind
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import BATCHES
from tuneship.store.database.tables import BatchRow
from tuneship.store.records.batch_records import INPUT

COMPLETION_WINDOW = timedelta(hours=24)
FILES = ("input_file_id", "output_file_id", "error_file_id")
# The moments of a batch, by the names of their columns.
MOMENTS = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


@serves_openai(contract.openai_create_batch)
def openai_create_batch(context: Context, batch: BatchCreate) -> BatchObject:
    """Record the batch; its file is checked in the background."""
    connection = context.transaction
    file_id, param = batch.input_file_id, "input_file_id"
    file = find_batch_file(context, file_id)
    if file is None:
        own_dataset(context, file_id, param)
    if file is None or file["purpose"] != INPUT:
        text = f"{param} must name a file of the purpose batch"
        raise OpenAIError(text, 400, (INVALID, "invalid_value"), param=param)
    most, is_open = context.parts.settings.maximum_active_batches, tables.batches.c.status.in_(OPEN)
    check_quota(context, tables.batches, most, "batches that have not ended", is_open)
    check_bytes(context, 1)  # else no answer could be kept
    row = rows.insert(
        connection,
        tables.batches,
        {
            "id": new_id("batch"),
            "client_id": context.client_id,
            "created_at": context.now,
            "updated_at": context.now,
            "tags": batch.metadata or {},
            "endpoint": batch.endpoint,
            "input_file_id": file["id"],
            "status": BatchStatus.VALIDATING,
            # Requests from a file that was not uploaded safely are not private.
            "caller": kept_caller(
                context, is_private=context.caller.is_private and file["came_safely"]
            ),
            "security_settings": NO_SAFEGUARDS,
            "total": 0,
            "completed": 0,
            "failed": 0,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "expires_at": context.now + COMPLETION_WINDOW,
        },
    )
    context.audit_facts.created_id = row["id"]
    context.headers["Location"] = f"/openai/v1/batches/{row['id']}"
    return _shown(row)


def _own(context: Context, batch_id: str) -> BatchRow:
    with context.read() as connection:
        row = rows.fetch(connection, tables.batches, batch_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such batch")
    context.touch(row)
    return row


@serves_openai(contract.openai_list_batches)
def openai_list_batches(
    context: Context, after: str | None = None, limit: int = 20
) -> BatchObjects:
    """Return a page of the caller's batches."""
    page, has_more = page_behind(context, BATCHES, [], after, limit)
    context.touch(*page)
    found = [_shown(row) for row in page]
    return BatchObjects.of(found, has_more=has_more)


@serves_openai(contract.openai_get_batch)
def openai_get_batch(context: Context, batch_id: str) -> BatchObject:
    """Return the batch."""
    return _shown(_own(context, batch_id))


@serves_openai(contract.openai_cancel_batch)
def openai_cancel_batch(context: Context, batch_id: str) -> BatchObject:
    """Mark it as cancelling; its requests in flight are cancelled within a second."""
    connection = context.transaction
    row = _own(context, batch_id)
    status = BatchStatus(row["status"])
    if status is BatchStatus.CANCELLING:
        return _shown(row)
    if status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        text = f"Cannot cancel a batch with status '{status}'."
        raise InvalidRequestError(text, status=409)
    now = context.now
    changes = {"status": BatchStatus.CANCELLING, "cancelling_at": now}
    rows.change(connection, tables.batches, batch_id, now, **changes)
    return _shown(_own(context, batch_id))


def _shown(row: BatchRow) -> BatchObject:
    moments: dict[str, datetime | None] = {name: row[name] for name in MOMENTS}
    files: dict[str, str | None] = {name: row[name] for name in FILES}
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    return BatchObject.model_validate(
        {
            **{name: row[name] for name in ("id", "endpoint", "model", "status")},
            **{
                name: None if moment is None else int(moment.timestamp())
                for name, moment in moments.items()
            },
            **{
                name: None if file_id is None else shown_id(file_id)
                for name, file_id in files.items()
            },
            "errors": None if row["errors"] is None else {"data": row["errors"]},
            "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
            "usage": {
                "input_tokens": prompt,
                "output_tokens": completion,
                "total_tokens": prompt + completion,
            },
            "metadata": row["tags"] or None,
        }
    )
