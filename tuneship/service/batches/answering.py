"""Answers one request of a batch as if its caller had sent it, through the handler of its operation.

The audit chain and the metrics record it like any other. What may pass by itself is tried again before it becomes the
answer.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from tuneship.contract.common import SERVICE
from tuneship.contract.openai import chat, completions, embeddings, responses
from tuneship.contract.openai.declaring import OpenAIOperation
from tuneship.contract.openai.embeddings import EmbeddingsCreate
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.access.hipaa import Caller
from tuneship.service.batches.input_lines import RequestLine
from tuneship.service.common.failures import declared
from tuneship.service.common.long_answers import dumped, is_long
from tuneship.service.common.refusals import refusal, refused
from tuneship.service.context.context import Context, Parts
from tuneship.service.openai.bindings import OPENAI_SERVED
from tuneship.service.openai.refusals import openai_refusal
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.tables import BatchRow

Body = (
    chat.ChatCompletionCreate
    | completions.TextCompletionCreate
    | responses.ResponseCreate
    | EmbeddingsCreate
)
# The operation of each address, and the model of its body.
OPERATIONS: dict[str, tuple[OpenAIOperation[..., Any], type[Body]]] = {
    "/v1/chat/completions": (chat.openai_create_chat_completion, chat.ChatCompletionCreate),
    "/v1/completions": (completions.openai_create_completion, completions.TextCompletionCreate),
    "/v1/responses": (responses.openai_create_response, responses.ResponseCreate),
    "/v1/embeddings": (embeddings.openai_create_embeddings, EmbeddingsCreate),
}
# OpenAI's codes of requests that were not answered.
UNANSWERED = {
    "batch_cancelled": "This request was not executed before the batch was cancelled.",
    "batch_expired": ("This request could not be executed before the completion window expired."),
}


@dataclass(frozen=True)
class CheckedRequest:
    """A request of a batch, with its body as its handler takes it, or why it does not take it."""

    custom_id: str
    body: Body | Exception


def checked(request: RequestLine, endpoint: str) -> CheckedRequest:
    """Check the body of a request. In a thread: a long one takes many milliseconds."""
    _, kind = OPERATIONS[endpoint]
    body: Body | Exception
    try:
        body = kind.model_validate(request.body, context=SERVICE, by_alias=True, by_name=False)
    except ValidationError as error:
        body = refusal(error)
    except Exception as error:  # noqa: BLE001 - each request is answered, whatever fails
        body = error
    else:
        if not isinstance(body, EmbeddingsCreate) and body.stream:
            body = refused("stream", "is not supported in a batch", "unsupported_value")
    return CheckedRequest(request.custom_id, body)


@dataclass(frozen=True)
class RequestAnswer:
    """A line of the output file, or of the error file."""

    line: bytes
    is_success: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str | None = None
    has_audit: bool = False
    """It touched something with `audit_logging`."""
    is_hipaa: bool = False
    """It touched something in hipaa mode."""


def unanswered(request: CheckedRequest, code: str) -> RequestAnswer:
    """The line of a request that is not answered any more."""
    error = {"code": code, "message": UNANSWERED[code]}
    fields = {"id": f"batch_{new_id('req')}"}
    line = {**fields, "custom_id": request.custom_id, "response": None, "error": error}
    return RequestAnswer(json.dumps(line).encode() + b"\n", is_success=False)


async def answer(
    parts: Parts, batch: BatchRow, request: CheckedRequest, retry_after_s: Sequence[float]
) -> RequestAnswer:
    """Answer a request, and retry it where an error may pass. `retry_after_s`: the pauses before the retries."""
    pauses = iter(retry_after_s)
    while True:
        context = _context_of(parts, batch)
        try:
            status, body = 200, await _handled(context, batch, request)
        except Exception as error:  # noqa: BLE001 - each request is answered, whatever fails
            refusal_ = openai_refusal(declared(error, context.request_id))
            pause = next(pauses, None) if refusal_.retryable else None
            if pause is not None:
                await asyncio.sleep(pause)
                continue
            status = refusal_.status
            body = json.dumps(refusal_.as_json(None)).encode()
        if context.audit_facts.requires_entry(status):
            await asyncio.to_thread(context.commit_audit_entry, status)
        return _line(context, request, status, body)


async def _handled(context: Context, batch: BatchRow, request: CheckedRequest) -> bytes:
    """The body of the answer."""
    if isinstance(request.body, Exception):
        raise request.body
    operation, _ = OPERATIONS[batch["endpoint"]]
    reply = await OPENAI_SERVED[operation.name].handler(context, request.body)
    # A handler of a long answer returns it as JSON.
    is_json = isinstance(reply, bytes)
    if is_json:
        return reply
    if not is_long(reply):
        return dumped(operation.reply_type, reply)
    texts = context.parts.threads.texts
    return await texts.run(context.client_id, dumped, operation.reply_type, reply)


def _context_of(parts: Parts, batch: BatchRow) -> Context:
    kept = batch["caller"]
    lifetime_s = kept["key_lifetime_s"]
    caller = Caller(
        is_private=kept["is_private"],
        is_address_known=kept["is_address_known"],
        key_lifetime=None if lifetime_s is None else timedelta(seconds=lifetime_s),
    )
    operation, _ = OPERATIONS[batch["endpoint"]]
    facts = AuditFacts(
        key_id=kept["key_id"],
        address=kept["address"],
        action=operation.name,
        path_id=batch["id"],
    )
    return Context(
        parts,
        batch["client_id"],
        new_id("req"),
        scopes=frozenset(kept["scopes"]),
        caller=caller,
        audit_facts=facts,
        is_background=True,
    )


def _line(context: Context, request: CheckedRequest, status: int, body: bytes) -> RequestAnswer:
    identifier = f"batch_{context.request_id}"
    head = {"id": identifier, "custom_id": request.custom_id}
    text = (
        json.dumps(head).encode()[:-1]
        + (
            f', "response": {{"status_code": {status}, "request_id": "{context.request_id}", "body": '
        ).encode()
    )
    line = text + body + b'}, "error": null}\n'
    facts, is_success = context.audit_facts, status == 200
    return RequestAnswer(
        line,
        is_success=is_success,
        prompt_tokens=facts.prompt_tokens or 0,
        completion_tokens=facts.completion_tokens or 0,
        model=context.model if is_success else None,
        has_audit=facts.is_required,
        is_hipaa=facts.touches_hipaa,
    )
