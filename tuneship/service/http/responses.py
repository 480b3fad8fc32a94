"""Renders refusals as HTTP responses."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tuneship.service.common.failures import error_from_exception
from tuneship.service.http.dialect import Dialect

# Statuses of answers given before the whole request was read, after which the connection closes.
CLOSING_STATUSES = (408, 413, 414, 431)


def error_response(request: Request, error: Exception) -> Response:
    """The refusal for any exception, in the form of the dialect that was called."""
    dialect: Dialect = request.state.dialect
    request_id: str = request.state.request_id
    refusal = dialect.refusal(request, error_from_exception(error, request_id))
    body = dialect.refusal_body(refusal, request_id)
    response = Response(body, refusal.status, media_type=dialect.refusal_media)
    response.headers.update(refusal.headers)
    response.headers["X-Should-Retry"] = "true" if refusal.retryable else "false"
    retry_after = refusal.retry_after
    if retry_after is None and refusal.status == 503:
        retry_after = 1
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    if refusal.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if refusal.status in CLOSING_STATUSES:
        response.headers["Connection"] = "close"
    return response


def json_response(status: int, body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
