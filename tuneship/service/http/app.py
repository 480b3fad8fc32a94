"""Binds every declared operation to its handler and runs it in one transaction.

Order of checks: framing, authentication, route, rate, scope, size, media type, syntax, fields, then the handler. How
values are read is in `service/arguments.py`; what happens inside an operation is in the resource's own file.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from tuneship.contract import openapi
from tuneship.contract.errors import (
    ApiError,
    InvalidRequestError,
    RateLimitExceeded,
    ResourceNotFound,
)
from tuneship.contract.operation import DECLARED, Operation
from tuneship.service.access.api_keys import Principal
from tuneship.service.access.audit_trail import AuditTrail
from tuneship.service.access.hipaa import Caller
from tuneship.service.common.streaming import Stream
from tuneship.service.context.bindings import BoundOperation
from tuneship.service.context.context import Context, Parts
from tuneship.service.http import profiles
from tuneship.service.http.answers import (
    error_response,
    refusal_of,
    reply_response,
    sealed_answer,
    stored_response,
)
from tuneship.service.http.arguments import path_arguments, query_arguments, validated
from tuneship.service.http.boundary import Boundary, InFlightLimits
from tuneship.service.http.content import SHORT_BODY, content_of, parsed
from tuneship.service.http.disconnect import cancel_on_disconnect
from tuneship.service.http.forms import Content
from tuneship.service.http.forwarding import is_address_known, is_scheme_known
from tuneship.service.http.health import Ready, alive
from tuneship.service.http.middleware import EntryMiddleware, address_of
from tuneship.service.http.rate_limits import RateWindow
from tuneship.service.http.routes import route_path
from tuneship.service.http.streams import StreamResponse
from tuneship.store import idempotency

# By which a refusal is late for a client that does not wait: as long as it should have waited.
LATE_S = 1.0
KEY_SHAPE = re.compile(r"[\x20-\x7e]{1,255}")


def build_app(
    served: Iterable[BoundOperation], boundary: Boundary, lifespan: Any = None
) -> ASGIApp:
    """The ASGI application that serves these operations."""
    # Routes are tried in turn, and generations are by far the most requests: they come first.
    operations = sorted(served, key=lambda one: not one.is_async)
    routes = [_operation_route(boundary, operation) for operation in operations]
    routes.append(_route("GET", "/healthz", alive(boundary.parts)))
    routes.append(_route("GET", "/readyz", Ready(boundary.parts).answer))
    routes.append(_route("GET", "/openapi.json", _described(boundary.parts)))
    refused = {HTTPException: _routing_refused(routes)}
    app = Starlette(routes=routes, exception_handlers=refused, lifespan=lifespan)
    app.router.redirect_slashes = False
    return EntryMiddleware(app, boundary)


def _described(parts: Parts) -> Callable[[Request], Awaitable[Response]]:
    """The document of the contract, made once."""
    told = openapi.document(parts.public_url, parts.settings.created_status)
    body = json.dumps(told, ensure_ascii=False).encode()

    async def answer(_request: Request) -> Response:
        # Big, and anybody may ask for it: one for each connection, so that nobody asks for hundreds and reads none.
        return Response(body, media_type="application/json", headers={"Connection": "close"})

    return answer


def _routing_refused(
    routes: Sequence[Route],
) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            methods = {
                method
                for route in routes
                if route.matches({**request.scope, "method": "-"})[0] is not Match.NONE
                for method in getattr(route, "methods", None) or ()
            }
            response = error_response(
                request, InvalidRequestError("the method is not allowed here", status=405)
            )
            response.headers["Allow"] = ", ".join(sorted(methods))
            return response
        return error_response(request, ResourceNotFound("there is no such route"))

    return answer


def _route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """Of one method: the framework would let HEAD in beside GET, which the contract does not declare."""
    route = Route(path, endpoint, methods=[method])
    route.methods = {method}
    return route


def _operation_route(boundary: Boundary, served: BoundOperation) -> Route:
    operation = served.operation
    path = route_path(operation.path, [one.path for one in DECLARED])
    return _route(operation.method, path, _endpoint(boundary, served))


def _endpoint(
    boundary: Boundary, served: BoundOperation
) -> Callable[[Request], Awaitable[Response]]:
    in_flight = _places(boundary, served)

    async def answer(request: Request) -> Response:
        principal: Principal = request.state.principal
        context = _context(boundary.parts, served.operation, request)
        try:
            _check_rate(request)
            principal.require(served.operation.scope)
            _check_conditions(served.operation, request)
            if in_flight is None:
                return await _run(boundary, served, request, context)
            with ExitStack() as held:
                held.enter_context(in_flight.slot(principal.client_id))
                response = await _run(boundary, served, request, context)
                if isinstance(response, StreamResponse):  # its place is free behind its last byte
                    response.slot = held.pop_all()
                return response
        except Exception as error:  # noqa: BLE001 - the last line of defence: it logs and answers
            await _slow_down(boundary, principal.client_id, error)
            return await _refuse(request, context, error)

    return answer


def _places(boundary: Boundary, served: BoundOperation) -> InFlightLimits | None:
    """Those that the operation needs; most need none."""
    if served.is_async:
        return boundary.generations
    if served.operation.is_form:
        return boundary.uploads
    return boundary.merges if served.is_long else None


def _context(parts: Parts, operation: Operation[..., Any], request: Request) -> Context:
    principal: Principal = request.state.principal
    address = address_of(request)
    return Context(
        parts=parts,
        client_id=principal.client_id,
        request_id=request.state.request_id,
        if_match=request.headers.get("if-match"),
        routing_key=request.headers.get("x-routing-key"),
        last_event_id=request.headers.get("last-event-id"),
        caller=Caller(
            is_private=_is_private(request, address),
            is_address_known=is_address_known(request.scope),
            key_lifetime=principal.lifetime,
        ),
        trail=AuditTrail(
            key_id=principal.key_id,
            address=address,
            action=operation.name,
            is_change=operation.is_change,
            named=next(iter(request.path_params.values()), None),
        ),
    )


def _is_private(request: Request, address: str) -> bool:
    """Over TLS or from this machine, and not handed on by a proxy of which nobody knows how it was reached."""
    is_here = bool(address) and ip_address(address).is_loopback
    return is_scheme_known(request.scope) and (request.scope["scheme"] == "https" or is_here)


async def _slow_down(boundary: Boundary, client_id: str, error: Exception) -> None:
    """A client that does not wait although it is told to, again and again: refusing it at once would fill the loop."""
    asks_to_wait = isinstance(error, ApiError) and error.retry_after is not None
    if asks_to_wait and boundary.limits.count_refusal(client_id):
        await asyncio.sleep(LATE_S)


async def _refuse(request: Request, context: Context, error: Exception) -> Response:
    refusal = refusal_of(request, error)
    try:
        await _commit_audit_entry(context, refusal.status)
    except Exception as failure:  # noqa: BLE001 - it logs and answers
        refusal = refusal_of(request, failure)
    return error_response(request, refusal)


async def _commit_audit_entry(context: Context, status: int) -> None:
    """Where the audit chain asks for it, its row is committed first: without the row no answer."""
    if context.trail.requires_entry(status):
        await asyncio.to_thread(context.commit_audit_entry, status)


def _check_rate(request: Request) -> None:
    window: RateWindow | None = request.state.window
    if window is not None and window.exceeded:
        text = "too many requests in this minute"
        raise RateLimitExceeded(text, retry_after=window.retry_after)


def _check_conditions(operation: Operation[..., Any], request: Request) -> None:
    """A condition that an operation cannot keep is refused: without it the change might not have been wanted."""
    if (
        operation.is_change
        and "if-match" in request.headers
        and "If-Match" not in operation.headers
    ):
        raise InvalidRequestError(
            "If-Match cannot be kept here, what it names has no version: leave it out"
        )


async def _run(
    boundary: Boundary, served: BoundOperation, request: Request, context: Context
) -> Response:
    operation, threads = served.operation, boundary.parts.threads
    async with content_of(operation, request, boundary.parts, context.client_id) as content:
        if profiles.HEADER in operation.headers:
            sent = request.headers.getlist(profiles.HEADER)
            context.profile = profiles.chosen(sent, context.client_id, boundary.parts.settings)
            is_paged = not {"limit", "offset"}.isdisjoint(request.query_params)
            context.wants_whole_lists = context.profile == "simplified" and not is_paged
        if len(content.body or b"") > SHORT_BODY:
            call = await threads.texts.run(context.client_id, _call, operation, request, content)
        else:
            call = _call(operation, request, content)
        if not served.is_async:
            turns = threads.files if served.is_long else threads.requests
            work = partial(_in_transaction, boundary, served, context, call)
            return await turns.run(context.client_id, work)
        reply = await cancel_on_disconnect(request, served.handler(context, **call.arguments))
        async with AsyncExitStack() as begun:
            if isinstance(reply, Stream):  # a model works on it already
                begun.push_async_callback(reply.frames.aclose)
            await _commit_audit_entry(context, operation.status)
            begun.pop_all()
        return _response(boundary, served, reply, context)


@dataclass(frozen=True)
class _Call:
    """What a request asks for, read and checked."""

    arguments: dict[str, Any]
    key: idempotency.Key | None


def _call(operation: Operation[..., Any], request: Request, content: Content) -> _Call:
    content = parsed(operation, content)
    key = _idempotency_key(operation, request, content.digest)
    return _Call(_arguments(operation, request, content), key)


def _response(boundary: Boundary, served: BoundOperation, reply: Any, context: Context) -> Response:
    if isinstance(reply, Stream):
        slot = nullcontext() if served.is_async else boundary.streams.slot(context.client_id)
        return StreamResponse(context, reply, slot)
    return reply_response(served.operation, reply, context)


def _in_transaction(
    boundary: Boundary, served: BoundOperation, context: Context, call: _Call
) -> Response:
    """Run a handler in one transaction together with its idempotency row and its row of the audit chain."""
    hold = None if call.key is None else _begin(context, call.key)
    if isinstance(hold, Response):
        return hold
    try:
        response = _handled(boundary, served, context, call.arguments)
        if hold is not None:
            answer = sealed_answer(response, boundary.parts.vault, hold.key)
            idempotency.finish(context.transaction, hold, answer)
        committed = context.commit()
    except BaseException as error:
        context.roll_back(error)
        if hold is not None:
            with boundary.parts.database.write() as connection:
                idempotency.abandon(connection, hold)
        raise
    if committed and served.operation.is_change:
        boundary.wake()
    return response


def _begin(context: Context, key: idempotency.Key) -> Response | idempotency.Hold:
    """What was answered to this key before, or the place of the answer to come."""
    with context.parts.database.write() as connection:
        begun = idempotency.begin(connection, key, context.now)
        if isinstance(begun, idempotency.Hold):
            return begun
        made = (begun.location or "").rpartition("/")[2]
        context.touch_by_id(connection, made or context.trail.named or "")
        context.add_audit_entry(connection, begun.status)
    return stored_response(begun, context.parts.vault, key)


def _handled(
    boundary: Boundary, served: BoundOperation, context: Context, arguments: dict[str, Any]
) -> Response:
    reply = served.handler(context, **arguments)
    response = _response(boundary, served, reply, context)
    if served.operation.is_creating:
        context.trail.made = reply.id
    if context.trail.requires_entry(response.status_code):
        context.add_audit_entry(context.transaction, response.status_code)
    return response


def _idempotency_key(
    operation: Operation[..., Any], request: Request, digest: str
) -> idempotency.Key | None:
    given = request.headers.getlist("idempotency-key")
    if not given or not operation.takes_idempotency_key:
        return None
    if len(given) > 1 or not KEY_SHAPE.fullmatch(given[0]):
        raise InvalidRequestError("Idempotency-Key must be 1 to 255 printable ASCII characters")
    text = f"{operation.method}\n{request.url.path}\n{digest}"
    if "if-match" in request.headers:  # another condition is another request
        text += f"\n{request.headers['if-match']}"
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return idempotency.Key(request.state.principal.client_id, given[0], fingerprint)


def _arguments(
    operation: Operation[..., Any], request: Request, content: Content
) -> dict[str, Any]:
    arguments = {
        **query_arguments(operation, request.query_params.multi_items()),
        **path_arguments(operation, request.path_params),
    }
    if operation.body_parameter is not None:
        name, model = operation.body_parameter
        arguments[name] = validated(model, content.fields)
    if operation.file_parameter is not None:
        arguments[operation.file_parameter] = content.file
    return arguments
