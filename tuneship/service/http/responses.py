"""Renders replies, refusals and stored answers as HTTP responses."""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tuneship.contract.errors import ApiError, InvalidRequestError
from tuneship.contract.operation import Operation
from tuneship.security.vault import Vault
from tuneship.service.common.failures import declared
from tuneship.service.common.long_answers import dumped
from tuneship.service.context.context import Context
from tuneship.service.http import openai, profiles
from tuneship.store.records import idempotency

# Statuses of answers given before the whole request was read, after which the connection closes.
CLOSING_STATUSES = (408, 413, 414, 431)


def refusal_of(request: Request, error: Exception) -> ApiError:
    """The declared error for any exception, in the form of the API that was called."""
    if isinstance(error, ClientDisconnect):
        error = InvalidRequestError("the body broke off")
    return openai.in_its_form(request.scope, declared(error, request.state.request_id))


def reply_response(operation: Operation[..., Any], reply: Any, context: Context) -> Response:
    # A handler of a long answer returns it as JSON.
    is_json = isinstance(reply, bytes)
    body = reply if is_json else dumped(operation.reply_type, reply)
    if context.profile != "auto":
        body = json.dumps(profiles.shaped(operation.name, context.profile, json.loads(body)))
    settings = context.parts.settings
    status = settings.created_status if operation.is_creating else operation.status
    response = Response(body, status, media_type="application/json")
    response.headers.update(context.headers)
    if profiles.HEADER in operation.headers:
        response.headers[profiles.HEADER] = context.profile
    if operation.is_creating:
        response.headers["Location"] = f"{operation.path.removesuffix('/merge')}/{reply.id}"
    return response


def sealed_answer(
    response: Response, vault: Vault, key: idempotency.Key
) -> idempotency.StoredAnswer:
    body = vault.seal(bytes(response.body), key.about)
    return idempotency.StoredAnswer(response.status_code, response.headers.get("location"), body)


def stored_response(
    stored: idempotency.StoredAnswer, vault: Vault, key: idempotency.Key
) -> Response:
    body = vault.open(stored.body, key.about)
    response = Response(body, stored.status, media_type="application/json")
    response.headers["Idempotent-Replayed"] = "true"
    if stored.location:
        response.headers["Location"] = stored.location
    return response


def error_response(request: Request, error: ApiError) -> Response:
    error = openai.in_its_form(request.scope, error)
    response = json_response(error.status, error.as_json(request.state.request_id))
    response.headers.update(error.headers)
    response.headers["X-Should-Retry"] = "true" if error.retryable else "false"
    retry_after = error.retry_after
    if retry_after is None and error.status == 503:
        retry_after = 1
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in CLOSING_STATUSES:
        response.headers["Connection"] = "close"
    return response


def json_response(status: int, body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
