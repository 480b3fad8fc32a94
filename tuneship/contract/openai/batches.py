"""Batches of OpenAI's API: a file of requests that are answered in the background, within a day."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from tuneship.contract.common import BatchId, Reply
from tuneship.contract.declaring.examples import MODEL, SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.ids import FileId
from tuneship.contract.openai.lists import AfterId, ListedObject, ObjectPage, PageSize
from tuneship.contract.openai.request_fields import OpenAIRequest
from tuneship.contract.openai.responses import (
    Metadata,
    ResponseUsage,
)

# Requests of one batch, texts to embed in all of them, and bytes of its file, as at OpenAI.
MAXIMUM_REQUESTS = 50_000
MAXIMUM_EMBEDDED_TEXTS = 50_000
MAXIMUM_FILE_BYTES = 200 << 20
BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
]


class BatchStatus(StrEnum):
    """States of a batch. A new one is `validating`; the last four are ends."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


# The states of a batch that has not ended.
OPEN = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


class BatchCreate(OpenAIRequest):
    """A file of requests, and the address that all of them are for."""

    unsupported = frozenset({"output_expires_after"})

    input_file_id: Annotated[FileId, Field(min_length=1, max_length=128)]
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchError(Reply):
    """A problem of the input file: its line, counted from 1, and the field, where there are."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Reply):
    """The problems of an input file, the first hundred of them."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchRequestCounts(Reply):
    """Requests of a batch; `completed` and `failed` are those whose answers are stored."""

    total: int
    completed: int
    failed: int


class BatchUsage(ResponseUsage):
    """Tokens that a batch took so far."""


class BatchObject(ListedObject):
    """A batch. Its files are there when it has ended; one without an answer or without an error is null."""

    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    model: Annotated[str | None, Field(description="The model that gave the first answer.")]
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchObjects(ObjectPage[BatchObject]):
    """A page of batches, newest first."""


EXAMPLE_BATCH: dict[str, Any] = {
    "id": f"batch_{SUFFIX}",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "model": MODEL,
    "errors": None,
    "input_file_id": f"file-{SUFFIX}",
    "completion_window": "24h",
    "status": "in_progress",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1_772_366_400,
    "in_progress_at": 1_772_366_401,
    "expires_at": 1_772_452_800,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 3, "completed": 1, "failed": 0},
    "usage": {
        "input_tokens": 21,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 27,
    },
    "metadata": {"night": "1"},
}


@openai_operation(
    "POST",
    "batches",
    scope="generate",
    changes=True,
    example=Example(
        {
            "chats": {
                "input_file_id": f"file-{SUFFIX}",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
        },
        EXAMPLE_BATCH,
    ),
)
def openai_create_batch(batch: BatchCreate) -> BatchObject:
    """Answer the requests of a file in the background, after all other requests."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "batches",
    scope="generate",
    example=Example(
        reply={
            "object": "list",
            "data": [EXAMPLE_BATCH],
            "first_id": EXAMPLE_BATCH["id"],
            "last_id": EXAMPLE_BATCH["id"],
            "has_more": False,
        }
    ),
)
def openai_list_batches(after: AfterId | None = None, limit: PageSize = 20) -> BatchObjects:
    """List batches, newest first."""
    raise NotImplementedError


@openai_operation(
    "GET", "batches/{batch_id}", scope="generate", example=Example(reply=EXAMPLE_BATCH)
)
def openai_get_batch(batch_id: BatchId) -> BatchObject:
    """Fetch one batch."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "batches/{batch_id}/cancel",
    scope="generate",
    changes=True,
    example=Example(reply={**EXAMPLE_BATCH, "status": "cancelling"}),
)
def openai_cancel_batch(batch_id: BatchId) -> BatchObject:
    """Cancel a batch; what was answered until then is in its output file."""
    raise NotImplementedError
