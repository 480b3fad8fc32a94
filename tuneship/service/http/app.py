"""Routes every request of every dialect to its operation: reads the call, and writes the answer.

Order of checks: framing, authentication, route, rate, scope, size, media type, syntax, fields, then the handler.
Nothing is looked up for a caller without the right to it, and a missing scope, whose refusal is a row of the audit
chain, counts towards the rate limit like any other request. The values are read by `context/arguments.py`;
`context/operation_calls.py` carries out the call.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import ApiError, InvalidRequestError
from tuneship.service.answers.streaming import Stream
from tuneship.service.context import profiles
from tuneship.service.context.arguments import path_arguments, query_arguments, validated
from tuneship.service.context.bindings import BoundOperation
from tuneship.service.context.context import Context
from tuneship.service.context.operation_calls import Arguments, OperationCalls, WholeAnswer
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.contexts import context_of
from tuneship.service.http.dialect import Dialect
from tuneship.service.http.disconnect import wait_for_disconnect
from tuneship.service.http.downloads import DownloadResponse
from tuneship.service.http.forms import Content
from tuneship.service.http.main_api import MAIN
from tuneship.service.http.middleware import EntryMiddleware
from tuneship.service.http.rate_limits import RateWindow
from tuneship.service.http.request_content import SHORT_BODY_BYTES, content_of, parsed
from tuneship.service.http.responses import error_response
from tuneship.service.http.routes import route, route_path
from tuneship.service.http.streams import StreamResponse
from tuneship.store.records import idempotency

# A client that ignores Retry-After gets its refusals this much later, as if it had waited.
LATE_REFUSAL_S = 1.0
KEY_SHAPE = re.compile(r"[\x20-\x7e]{1,255}")


def build_app(
    served: Iterable[BoundOperation],
    boundary: Boundary,
    dialects: Iterable[Dialect],
    lifespan: Any = None,
) -> ASGIApp:
    """The ASGI application that serves these operations, in the main API and in `dialects`."""
    dialects = (*dialects, MAIN)
    paths = [operation.path for dialect in dialects for operation in dialect.declared]
    routes = [
        route(
            bound.operation.method,
            route_path(bound.operation.path, paths),
            OperationEndpoint(boundary, bound).answer,
        )
        # Routes are tried in order, and generations are by far the most frequent requests.
        for bound in sorted(served, key=lambda bound: not bound.is_async)
    ]
    routes += [more for dialect in dialects for more in dialect.routes(boundary)]

    handlers = {HTTPException: partial(_unknown_route, routes)}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return EntryMiddleware(app, boundary, dialects)


async def _unknown_route(routes: Sequence[Route], request: Request, error: Exception) -> Response:
    """404 for a path that no route has; 405 with the allowed methods for another method of one that has."""
    if not isinstance(error, HTTPException) or error.status_code != 405:
        return error_response(request, request.state.dialect.unknown_route())
    methods = {
        method
        for route in routes
        if route.matches({**request.scope, "method": "-"})[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }
    not_allowed = InvalidRequestError("the method is not allowed here", status=405)
    response = error_response(request, not_allowed)
    response.headers["Allow"] = ", ".join(sorted(methods))
    return response


class OperationEndpoint:
    """Reads the requests of one operation, and writes the answers."""

    def __init__(
        self,
        boundary: Boundary,
        bound: BoundOperation,
        end_of: Callable[[Request], Coroutine[Any, Any, ApiError]] | None = None,
    ) -> None:
        """Answer calls of one operation, which has a handler.

        `end_of` returns, when the caller may not read on, the error that a stream ends with; by default its key's end.
        """
        self._end_of = end_of
        self._operation = bound.operation
        self._boundary = boundary
        self._settings = boundary.parts.settings
        self._limits = boundary.limits
        self._calls = OperationCalls(bound, boundary.keys, boundary.slots)

    async def answer(self, request: Request) -> Response:
        """Answer one request of a caller who is known."""
        dialect: Dialect = request.state.dialect
        identifier = next(iter(request.path_params.values()), None)
        context = context_of(self._boundary, self._operation, request, identifier)
        request.state.operation, request.state.span = self._operation, context.span
        try:
            window: RateWindow | None = request.state.window
            if window is not None:
                window.check()
            answer = await self._calls.carry_out(
                context,
                self._reading(request, context),
                partial(wait_for_disconnect, request.receive),
                lambda error: dialect.own_error(request, error).status,
            )
        except Exception as error:  # noqa: BLE001 - the last line of defence: it logs and answers
            # A client that ignores Retry-After again and again would keep the event loop busy with
            # refusals, so it is answered late.
            has_wait = isinstance(error, ApiError) and error.retry_after is not None
            if has_wait and self._limits.count_refusal(context.client_id):
                await asyncio.sleep(LATE_REFUSAL_S)
            return error_response(request, error)
        if isinstance(answer, WholeAnswer):
            response = Response(answer.body, answer.status, media_type="application/json")
            response.headers.update(answer.headers)
            return response
        if isinstance(answer.content, Stream):
            end = answer.key_end if self._end_of is None else partial(self._end_of, request)
            return StreamResponse(context, answer.content, answer.slot, end)
        return DownloadResponse(context, answer.content, answer.slot, answer.key_end)

    @asynccontextmanager
    async def _reading(self, request: Request, context: Context) -> AsyncGenerator[Arguments]:
        operation = self._operation
        async with content_of(operation, request, context) as content:
            if profiles.HEADER in operation.headers:
                sent = request.headers.getlist(profiles.HEADER)
                context.profile = profiles.chosen(sent, context.client_id, self._settings)
                is_paged = not {"limit", "offset"}.isdisjoint(request.query_params)
                context.wants_whole_lists = context.profile == "simplified" and not is_paged
            # A long body takes milliseconds to parse, which would delay every other request.
            if len(content.body or b"") > SHORT_BODY_BYTES:
                read = context.parts.threads.texts.run
                yield await read(context.client_id, _arguments, operation, request, content)
            else:
                yield _arguments(operation, request, content)


def _arguments(operation: Operation[..., Any], request: Request, content: Content) -> Arguments:
    content = parsed(operation, content)
    given, key = request.headers.getlist("idempotency-key"), None
    retry: int | None = request.state.dialect.retry_count(request)
    if (given or retry is not None) and operation.takes_idempotency_key:
        if given and (len(given) > 1 or not KEY_SHAPE.fullmatch(given[0])):
            text = "Idempotency-Key must be 1 to 255 printable ASCII characters"
            raise InvalidRequestError(text)
        text = f"{operation.method}\n{request.url.path}\n{content.digest}"
        if "if-match" in request.headers:  # another condition is another request
            text += f"\n{request.headers['if-match']}"
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        name = given[0] if given else f"stainless:{fingerprint}"
        client_id = request.state.principal.client_id
        key = idempotency.Key(client_id, name, fingerprint, None if given else retry)

    values = {
        **query_arguments(operation, request.query_params.multi_items()),
        **path_arguments(operation, request.path_params),
    }
    if operation.body_parameter is not None:
        name, model = operation.body_parameter
        values[name] = validated(model, content.fields)
    if operation.file_parameter is not None:
        values[operation.file_parameter] = content.file
    return Arguments(values, key, content.no_room)
