"""Renders errors as HTTP responses."""

from starlette.requests import Request
from starlette.responses import Response

from tuneship.service.answers.failures import error_from_exception
from tuneship.service.http.dialect import Dialect

# Statuses of answers given before the whole request was read, after which the connection closes.
CLOSING_STATUSES = (408, 413, 414, 431)


def error_response(request: Request, error: Exception) -> Response:
    """The response to a request that raised an exception, in the form of the dialect that was called."""
    dialect: Dialect = request.state.dialect
    request_id: str = request.state.request_id
    shown = dialect.own_error(request, error_from_exception(error, request_id))
    response = dialect.error_answer(request, shown, request_id)
    response.headers.update(shown.headers)
    response.headers["X-Should-Retry"] = "true" if shown.retryable else "false"
    retry_after = shown.retry_after
    if retry_after is None and shown.status == 503:
        retry_after = 1
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    if shown.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if shown.status in CLOSING_STATUSES:
        response.headers["Connection"] = "close"
    return response
