"""Renders replies, refusals and stored answers as HTTP responses."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tuneship.contract.errors import ApiError
from tuneship.service.common.failures import declared
from tuneship.service.http import openai

# Statuses of answers given before the whole request was read, after which the connection closes.
CLOSING_STATUSES = (408, 413, 414, 431)


def refusal_of(request: Request, error: Exception) -> ApiError:
    """The declared error for any exception, in the form of the API that was called."""
    return openai.in_its_form(request.scope, declared(error, request.state.request_id))


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
