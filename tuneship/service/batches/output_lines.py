"""Writes OpenAI's line for each request of a batch: its answer, its error, or why it was not answered."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tuneship.contract.errors import ApiError
from tuneship.contract.openai import chat, completions, embeddings, responses
from tuneship.contract.openai.declaring import OpenAIOperation
from tuneship.service.answers.long_answers import dumped
from tuneship.service.context.context import Context
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.service.openai.embeddings import embeddings_run
from tuneship.service.openai.errors import openai_error
from tuneship.service.openai.generation import chat_run, text_run
from tuneship.service.openai.openai_run import OpenAIRun
from tuneship.service.openai.responses import response_run
from tuneship.store.database.identifiers import new_id

Body = (
    chat.ChatCompletionCreate
    | completions.TextCompletionCreate
    | responses.ResponseCreate
    | embeddings.EmbeddingsCreate
)
# The operation of each address, and the model of its body.
OPERATIONS: dict[str, tuple[OpenAIOperation[..., Any], type[Body]]] = {
    "/v1/chat/completions": (chat.openai_create_chat_completion, chat.ChatCompletionCreate),
    "/v1/completions": (completions.openai_create_completion, completions.TextCompletionCreate),
    "/v1/responses": (responses.openai_create_response, responses.ResponseCreate),
    "/v1/embeddings": (embeddings.openai_create_embeddings, embeddings.EmbeddingsCreate),
}
# What makes a run of the main API of each body.
RUNS: dict[type[Body], Callable[[Context, Any], Awaitable[OpenAIRun[Any]]]] = {
    chat.ChatCompletionCreate: chat_run,
    completions.TextCompletionCreate: text_run,
    responses.ResponseCreate: response_run,
    embeddings.EmbeddingsCreate: embeddings_run,
}
# OpenAI's codes of requests that were not answered.
UNANSWERED = {
    "batch_cancelled": "This request was not executed before the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}


@dataclass(frozen=True)
class BatchRequest:
    """The request of one line, with its parsed body or the reason why it is refused."""

    custom_id: str
    endpoint: str
    body: Body | Exception

    async def begin(self, context: Context) -> tuple[RoutedRun, Callable[[], bytes]]:
        if isinstance(self.body, Exception):
            raise self.body
        operation, _ = OPERATIONS[self.endpoint]
        answering = await RUNS[type(self.body)](context, self.body)

        def line() -> bytes:
            reply = answering.reply()
            is_json = isinstance(reply, bytes)  # vectors are
            body = reply if is_json else dumped(operation.reply_type, reply)
            return self._line(context, 200, body)

        return answering.run, line

    def failed(self, context: Context, error: ApiError) -> tuple[int, bytes]:
        shown = openai_error(error)
        body = json.dumps(shown.as_json(None)).encode()
        return shown.status, self._line(context, shown.status, body)

    def unanswered(self, why_not: str) -> bytes:
        fields = {"id": f"batch_{new_id('req')}", "custom_id": self.custom_id, "response": None}
        error = {"code": why_not, "message": UNANSWERED[why_not]}
        return json.dumps(fields | {"error": error}).encode() + b"\n"

    def _line(self, context: Context, status: int, body: bytes) -> bytes:
        head = {"id": f"batch_{context.request_id}", "custom_id": self.custom_id}
        response = {"status_code": status, "request_id": context.request_id}
        # The body is JSON already, and may be long.
        begin = f'{json.dumps(head)[:-1]}, "response": {json.dumps(response)[:-1]}, "body": '
        return begin.encode() + body + b'}, "error": null}\n'
