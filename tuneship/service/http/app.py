"""Binds every declared operation to its handler and runs it in one transaction.

Order of checks: framing, authentication, route, rate, scope, size, media type, syntax, fields, then the handler. The
values are read by `arguments.py`; handlers are in the packages of their resources.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
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
    AuthenticationError,
    InvalidRequestError,
    RateLimitExceeded,
    ResourceNotFound,
)
from tuneship.contract.openai.declaring import OPENAI
from tuneship.contract.operation import DECLARED, Operation
from tuneship.service.access.api_keys import Principal
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.access.hipaa import Caller
from tuneship.service.common.downloads import Download
from tuneship.service.common.long_answers import is_long
from tuneship.service.common.streaming import Stream
from tuneship.service.context import profiles
from tuneship.service.context.bindings import BoundOperation
from tuneship.service.context.context import Context, Parts
from tuneship.service.context.request_slots import InFlightLimits
from tuneship.service.http import openai as openai_form
from tuneship.service.http.arguments import path_arguments, query_arguments, validated
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.disconnect import cancel_on_disconnect, wait_for_disconnect
from tuneship.service.http.downloads import DownloadResponse
from tuneship.service.http.forms import Content
from tuneship.service.http.forwarding import is_address_known, is_scheme_known
from tuneship.service.http.health import Readiness, alive
from tuneship.service.http.middleware import EntryMiddleware, address_of
from tuneship.service.http.rate_limits import RateWindow
from tuneship.service.http.request_content import SHORT_BODY_BYTES, content_of, parsed
from tuneship.service.http.responses import (
    error_response,
    refusal_of,
    reply_response,
    sealed_answer,
    stored_response,
)
from tuneship.service.http.routes import route_path
from tuneship.service.http.streams import StreamResponse
from tuneship.store.records import idempotency

# A client that ignores Retry-After gets its refusals this much later, as if it had waited.
LATE_REFUSAL_S = 1.0
KEY_SHAPE = re.compile(r"[\x20-\x7e]{1,255}")


def build_app(
    served: Iterable[BoundOperation], boundary: Boundary, lifespan: Any = None
) -> ASGIApp:
    """The ASGI application that serves these operations."""
    # Routes are tried in order, and generations are by far the most frequent requests.
    operations = sorted(served, key=lambda bound: not bound.is_async)
    paths = [operation.path for operation in (*DECLARED, *OPENAI)]
    routes = [
        _route(
            bound.operation.method,
            route_path(bound.operation.path, paths),
            _OperationEndpoint(boundary, bound).answer,
        )
        for bound in operations
    ]
    parts = boundary.parts

    async def describe(_request: Request) -> Response:
        # Made for the first one who asks, on a thread: it takes longer than the rest of the start.
        body = await asyncio.to_thread(_described, parts.public_url, parts.settings.created_status)
        # The document is large and needs no key. One for each connection, so that nobody requests
        # hundreds of them and reads none.
        headers = {"Connection": "close"}
        return Response(body, media_type="application/json", headers=headers)

    routes.append(_route("GET", "/healthz", alive(parts)))
    routes.append(_route("GET", "/readyz", Readiness(boundary).answer))
    routes.append(_route("GET", "/openapi.json", describe))

    async def refuse_route(request: Request, error: Exception) -> Response:
        return _route_refusal(routes, request, error)

    app = Starlette(
        routes=routes, exception_handlers={HTTPException: refuse_route}, lifespan=lifespan
    )
    app.router.redirect_slashes = False
    return EntryMiddleware(app, boundary)


@lru_cache(maxsize=4)
def _described(url: str, created_status: int) -> bytes:
    return json.dumps(openapi.document(url, created_status), ensure_ascii=False).encode()


def _route_refusal(routes: Sequence[Route], request: Request, error: Exception) -> Response:
    """404 for a path that no route has; 405 with the allowed methods for another method of one that has."""
    if not isinstance(error, HTTPException) or error.status_code != 405:
        unknown = ResourceNotFound("there is no such route")
        is_openai = openai_form.is_openai(request.scope)
        return error_response(request, openai_form.no_such_route(unknown) if is_openai else unknown)
    methods = {
        method
        for route in routes
        if route.matches({**request.scope, "method": "-"})[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }
    refusal = InvalidRequestError("the method is not allowed here", status=405)
    response = error_response(request, refusal)
    response.headers["Allow"] = ", ".join(sorted(methods))
    return response


def _route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    route = Route(path, endpoint, methods=[method])
    # The framework adds HEAD to GET, which the contract does not declare.
    route.methods = {method}
    return route


class _OperationEndpoint:
    """Answers the requests of one operation."""

    def __init__(self, boundary: Boundary, bound: BoundOperation) -> None:
        self._boundary = boundary
        self._bound = bound
        self._operation = bound.operation
        self._parts = boundary.parts
        # Most operations are over in milliseconds and need no limit on their requests in flight.
        self._in_flight: InFlightLimits | None = None
        if bound.operation.is_download:
            self._in_flight = boundary.exports
        elif bound.is_async:
            self._in_flight = boundary.generations
        elif bound.operation.is_form:
            self._in_flight = boundary.uploads
        elif bound.is_long:
            self._in_flight = boundary.merges

    async def answer(self, request: Request) -> Response:
        principal: Principal = request.state.principal
        context = _context_of(self._parts, self._operation, request)
        request.state.operation, request.state.span = self._operation, context.span
        try:
            _check_access(self._operation, request)
            if self._in_flight is None:
                return await self._run(request, context)
            with ExitStack() as held:
                held.enter_context(self._in_flight.slot(principal.client_id))
                response = await self._run(request, context)
                if isinstance(response, StreamResponse | DownloadResponse):
                    # A stream keeps its slot until its last byte.
                    response.slot = held.pop_all()
                return response
        except Exception as error:  # noqa: BLE001 - the last line of defence: it logs and answers
            return await self._refuse(request, context, error)

    async def _refuse(self, request: Request, context: Context, error: Exception) -> Response:
        # A client that ignores Retry-After again and again would keep the event loop busy with
        # refusals, so it is answered late.
        has_wait = isinstance(error, ApiError) and error.retry_after is not None
        if has_wait and self._boundary.limits.count_refusal(context.client_id):
            await asyncio.sleep(LATE_REFUSAL_S)
        refusal = refusal_of(request, error)
        try:
            await _commit_audit_entry(context, refusal.status)
        except Exception as failure:  # noqa: BLE001 - it logs and answers
            refusal = refusal_of(request, failure)
        return error_response(request, refusal)

    async def _run(self, request: Request, context: Context) -> Response:
        operation, threads = self._operation, self._parts.threads
        async with content_of(operation, request, context) as content:
            if profiles.HEADER in operation.headers:
                sent = request.headers.getlist(profiles.HEADER)
                context.profile = profiles.chosen(sent, context.client_id, self._parts.settings)
                is_paged = not {"limit", "offset"}.isdisjoint(request.query_params)
                context.wants_whole_lists = context.profile == "simplified" and not is_paged

            # A long body takes milliseconds to parse, which would delay every other request.
            if len(content.body or b"") > SHORT_BODY_BYTES:
                call = await threads.texts.run(
                    context.client_id, _call, operation, request, content
                )
            else:
                call = _call(operation, request, content)
            # The file may have taken long to arrive.
            keys, key_id = self._boundary.keys, context.audit_facts.key_id
            if operation.is_form and await asyncio.to_thread(keys.is_ended, key_id):
                raise _key_ended()
            if not self._bound.is_async:
                return await self._in_thread(request, context, call)

            handling = self._bound.handler(context, **call.arguments)
            reply = await cancel_on_disconnect(request, handling, self._key_end(context))
            async with AsyncExitStack() as begun:
                if isinstance(reply, Stream):
                    # A model works on it already: close it when the audit entry cannot be written.
                    begun.push_async_callback(reply.frames.aclose)
                elif isinstance(reply, Download):
                    begun.callback(reply.close)
                await _commit_audit_entry(context, operation.status)
                begun.pop_all()
            if is_long(reply):
                return await threads.texts.run(context.client_id, self._response, reply, context)
            return self._response(reply, context)

    async def _in_thread(self, request: Request, context: Context, call: "_Call") -> Response:
        threads, work = self._parts.threads, partial(self._in_transaction, context, call)
        if self._bound.own_threads is None:
            pool = threads.files if self._bound.is_long else threads.requests
            return await pool.run(context.client_id, work)
        # Nothing is cancelled: the thread ends its work, and with it the transaction.
        ends = (wait_for_disconnect(request.receive), self._key_end(context))
        ending = [asyncio.ensure_future(end) for end in ends]
        for end in ending:
            end.add_done_callback(lambda _: context.left.set())
        try:
            return await getattr(threads, self._bound.own_threads).run(context.client_id, work)
        except ApiError:
            if context.key_has_ended:
                raise _key_ended() from None
            raise
        finally:
            for end in ending:
                end.cancel()

    async def _key_end(self, context: Context) -> ApiError:
        """The refusal of a caller whose key has ended, as soon as it has."""
        await self._boundary.keys.wait_until_ended(context.audit_facts.key_id)
        context.key_has_ended = True
        return _key_ended()

    def _response(self, reply: Any, context: Context) -> Response:
        key_end = partial(self._key_end, context)
        if isinstance(reply, Stream):
            is_held = self._bound.is_async  # a generation holds its slot already
            streams = self._boundary.streams
            slot = nullcontext() if is_held else streams.slot(context.client_id)
            return StreamResponse(context, reply, slot, key_end)
        if isinstance(reply, Download):
            return DownloadResponse(context, reply, key_end)
        return reply_response(self._operation, reply, context)

    def _handled(self, context: Context, call: "_Call") -> Any:
        if call.refusal is not None:
            raise call.refusal
        return self._bound.handler(context, **call.arguments)

    def _in_transaction(self, context: Context, call: "_Call") -> Response:
        """Run the handler in one transaction with its idempotency row and its audit entry."""
        hold = None if call.key is None else _hold_key(context, call.key)
        if isinstance(hold, Response):
            return hold
        try:
            reply = self._handled(context, call)
            response = self._response(reply, context)
            if self._operation.is_creating:
                context.audit_facts.created_id = reply.id
            if context.audit_facts.requires_entry(response.status_code):
                context.add_audit_entry(context.transaction, response.status_code)
            if hold is not None:
                answer = sealed_answer(response, self._parts.vault, hold.key)
                idempotency.finish(context.transaction, hold, answer)
            context.commit()
        except BaseException as error:
            context.roll_back(error)
            if hold is not None:
                # Outside the transaction, which is gone: the key is free for a retry.
                with self._parts.database.write(context.client_id) as connection:
                    idempotency.abandon(connection, hold)
            raise
        return response


def _context_of(parts: Parts, operation: Operation[..., Any], request: Request) -> Context:
    principal: Principal = request.state.principal
    address = address_of(request)
    # Private is TLS or this machine, unless a proxy is in between that may have been reached otherwise: in a cluster
    # there always is one.
    is_alone = parts.settings.cluster is None
    is_local = is_alone and bool(address) and ip_address(address).is_loopback
    is_private = is_scheme_known(request.scope) and (request.scope["scheme"] == "https" or is_local)
    return Context(
        parts=parts,
        client_id=principal.client_id,
        request_id=request.state.request_id,
        if_match=request.headers.get("if-match"),
        routing_key=request.headers.get("x-routing-key"),
        last_event_id=request.headers.get("last-event-id"),
        scopes=principal.scopes,
        accept=request.headers.get("accept", ""),
        caller=Caller(
            is_private=is_private,
            is_address_known=is_address_known(request.scope),
            key_lifetime=principal.lifetime,
        ),
        audit_facts=AuditFacts(
            key_id=principal.key_id,
            address=address,
            action=operation.name,
            is_change=operation.is_change,
            path_id=openai_form.stored_id(request.scope, request.path_params),
        ),
    )


def _key_ended() -> AuthenticationError:
    return AuthenticationError("the API key was revoked or has expired")


async def _commit_audit_entry(context: Context, status: int) -> None:
    """Commit the audit entry of a request that requires one; without it there is no answer."""
    if context.audit_facts.requires_entry(status):
        await asyncio.to_thread(context.commit_audit_entry, status)


def _check_access(operation: Operation[..., Any], request: Request) -> None:
    """Check the rate limit, the key's scope and the request's condition."""
    window: RateWindow | None = request.state.window
    if window is not None and window.exceeded:
        text = "too many requests in this minute"
        raise RateLimitExceeded(text, retry_after=window.retry_after)
    principal: Principal = request.state.principal
    principal.require(operation.scope)
    # A change that cannot check the condition is refused: without it the caller may not want the change.
    is_conditional = "if-match" in request.headers
    if operation.is_change and is_conditional and "If-Match" not in operation.headers:
        raise InvalidRequestError(
            "If-Match is not supported here, since the resource has no version: leave it out"
        )


@dataclass(frozen=True)
class _Call:
    """A request that was read and checked."""

    arguments: dict[str, Any]
    key: idempotency.Key | None
    refusal: ApiError | None = None


def _call(operation: Operation[..., Any], request: Request, content: Content) -> _Call:
    content = parsed(operation, content)
    given, key = request.headers.getlist("idempotency-key"), None
    retry = openai_form.retry_count(request)
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

    arguments = {
        **query_arguments(operation, request.query_params.multi_items()),
        **path_arguments(operation, request.path_params),
    }
    if operation.body_parameter is not None:
        name, model = operation.body_parameter
        arguments[name] = validated(model, content.fields)
    if operation.file_parameter is not None:
        arguments[operation.file_parameter] = content.file
    return _Call(arguments, key, content.refusal)


def _hold_key(context: Context, key: idempotency.Key) -> Response | idempotency.Hold | None:
    """The stored answer to an idempotency key, or a hold on the key for the answer to come."""
    begin = idempotency.begin if key.retry is None else idempotency.begin_try
    with context.parts.database.write(context.client_id) as connection:
        begun = begin(connection, key, context.now, context.parts.member_number)
        if begun is None or isinstance(begun, idempotency.Hold):
            return begun
        # A replayed answer is audited like the first one, by the resource that it is about.
        created_id = (begun.location or "").rpartition("/")[2]
        context.touch_by_id(connection, created_id or context.audit_facts.path_id or "")
        context.add_audit_entry(connection, begun.status)
    return stored_response(begun, context.parts.vault, key)
