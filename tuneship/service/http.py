"""The one file that knows FastAPI: binds every declared operation to its handler and keeps the border strict.

Order of checks: framing, authentication, route, scope, rate, size, media type, syntax, fields, then the handler. How
values are read is in `arguments.py`; what happens inside an operation is in the resource's own file.
"""

import asyncio
import errno
import hashlib
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    RateLimitExceeded,
    ResourceNotFound,
)
from tuneship.contract.operation import Operation
from tuneship.service.access import Keys, Principal, RateLimits, RateWindow
from tuneship.service.arguments import (
    check_file_media,
    check_json_media,
    form_end,
    form_tags,
    json_object,
    path_arguments,
    query_arguments,
    validated,
)
from tuneship.service.body import Patience
from tuneship.service.context import Context, Parts
from tuneship.service.resources import SERVED
from tuneship.service.serving_table import Served
from tuneship.store import idempotency
from tuneship.store.identifiers import new_id

logger = logging.getLogger(__name__)

JSON_BODY_LIMIT = 1 << 20
FILE_LIMIT = 2 << 30
HEADER_LIMIT = 16 << 10
TARGET_LIMIT = 8 << 10
OPEN_PATHS = {"/openapi.json", "/healthz", "/readyz"}
KEY_SHAPE = re.compile(r"[\x20-\x7e]{1,255}")
CLOSING = (408, 413, 414, 431)
"""Answers given before the whole request was read: the connection ends with them."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE)


class _InFlight:
    """How many requests of one kind each client has under way, and all clients together."""

    def __init__(self, each: int, together: int) -> None:
        self._each = each
        self._together = together
        self._running: Counter[str] = Counter()

    @contextmanager
    def slot(self, client_id: str) -> Generator[None]:
        if self._running.total() >= self._together:
            raise InternalError("the service is busy", status=503, retry_after=1)
        if self._running[client_id] >= self._each:
            raise RateLimitExceeded("too many of these requests at the same time", retry_after=1)
        self._running[client_id] += 1
        try:
            yield
        finally:
            self._running[client_id] -= 1
            if not self._running[client_id]:
                del self._running[client_id]


@dataclass(frozen=True)
class Border:
    """What the boundary needs beside the handlers' parts."""

    parts: Parts
    keys: Keys
    limits: RateLimits
    wake: Callable[[], None]
    """Tells the supervisor that something was committed."""
    generations: _InFlight = field(default_factory=lambda: _InFlight(each=64, together=256))
    uploads: _InFlight = field(default_factory=lambda: _InFlight(each=4, together=16))


def build_app(border: Border, lifespan: Any = None) -> ASGIApp:
    """The ASGI application with every served operation."""
    app = FastAPI(
        title="tuneship",
        version="v1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    for served in SERVED.values():
        _add_route(app, border, served)
    for path in ("/healthz", "/readyz"):
        app.add_api_route(path, _healthy(border.parts), include_in_schema=False)
    app.add_exception_handler(HTTPException, _routing_refused(app))
    return _Guard(app, border)


def _healthy(parts: Parts) -> Callable[[Request], Awaitable[Response]]:
    def query() -> None:
        with parts.database.read() as connection:
            connection.exec_driver_sql("select 1")

    async def health(request: Request) -> Response:
        try:
            await asyncio.to_thread(query)
        except Exception as error:  # noqa: BLE001 - it logs, and answers 503 or 500
            return _error_response(request, _refusal_of(request, error))
        return _json_response(200, {"status": "ok"})

    return health


def _routing_refused(app: FastAPI) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            methods = {
                method
                for route in app.routes
                if route.matches({**request.scope, "method": "-"})[0] is not Match.NONE
                for method in getattr(route, "methods", None) or ()
            }
            response = _error_response(
                request, InvalidRequestError("the method is not allowed here", status=405)
            )
            response.headers["Allow"] = ", ".join(sorted(methods))
            return response
        return _error_response(request, ResourceNotFound("there is no such route"))

    return answer


class _Guard:
    """Every request first: an id, the caller, the rate window; and the headers of every answer."""

    def __init__(self, app: ASGIApp, border: Border) -> None:
        self._app = app
        self._border = border

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = cast("MutableMapping[str, Any]", scope.setdefault("state", {}))
        state["request_id"] = new_id("req")
        request, answer = Request(scope), _Answer(state, send)
        started = time.perf_counter()
        try:
            _check_framing(scope)
            if len(scope["path"]) > 1:
                scope["path"] = scope["path"].rstrip("/") or "/"
            if scope["path"] not in OPEN_PATHS:
                await self._authenticate(request)
            await self._app(scope, Patience(scope, receive).receive, answer.send)
        except Exception as error:
            if answer.status:  # half an answer is out: only the server can break the connection
                raise
            response = _error_response(request, _refusal_of(request, error))
            if response.status_code == 400:  # the framing is wrong: nothing after it can be trusted
                response.headers["Connection"] = "close"
            await response(scope, receive, answer.send)
        finally:
            _log_access(scope, state["request_id"], answer.status, started)

    async def _authenticate(self, request: Request) -> None:
        border, address = self._border, request.client.host if request.client else ""
        border.limits.check_source(address)
        headers = request.headers
        try:
            principal = await asyncio.to_thread(
                border.keys.recognise,
                headers.getlist("authorization"),
                headers.getlist("x-client-id"),
            )
        except AuthenticationError:
            border.limits.count_failure(address)
            raise
        request.state.principal = principal
        kind = "generate" if request.scope["path"].endswith("/generate") else "control"
        request.state.window = border.limits.count(principal.client_id, kind)


class _Answer:
    """Puts the common headers on an answer and remembers its status."""

    def __init__(self, state: Mapping[str, Any], send: Send) -> None:
        self._state = state
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in _common_headers(self._state).items():
                message["headers"].append((name.lower().encode(), value.encode()))
        await self._send(message)


def _check_framing(scope: Scope) -> None:
    """What the HTTP server lets through and nothing behind it should see."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    if sum(len(name) + len(value) + 4 for name, value in headers) > HEADER_LIMIT:
        raise InvalidRequestError("the headers are larger than 16 KiB", status=431)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > TARGET_LIMIT:
        raise InvalidRequestError("the address is longer than 8 KiB", status=414)
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise InvalidRequestError("the length of the body is given twice")


def _log_access(scope: Scope, request_id: str, status: int, started: float) -> None:
    """One line a request: the path as it was encoded, never the query, a header or a body."""
    path = (scope.get("raw_path") or b"").partition(b"?")[0][:128].decode("ascii", "replace")
    took_ms = (time.perf_counter() - started) * 1000
    logger.info("%s %s %s %d %.0f ms", request_id, scope["method"], path, status, took_ms)


def _refusal_of(request: Request, error: Exception) -> ApiError:
    """The declared answer to whatever went wrong; no traceback, path or SQL ever leaves the service."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnect):
        return InvalidRequestError("the body broke off")
    logger.error("%s failed", request.state.request_id, exc_info=error)
    is_full = isinstance(error, OSError) and error.errno in NO_ROOM
    if is_full or isinstance(error, OperationalError | PoolTimeout):
        return InternalError("the database or the disk is not available", status=503, retry_after=2)
    return InternalError("the service failed unexpectedly")


def _common_headers(state: Mapping[str, Any]) -> dict[str, str]:
    window: RateWindow | None = state.get("window")
    return {"X-Request-ID": state["request_id"], **(window.headers if window else {})}


def _add_route(app: FastAPI, border: Border, served: Served) -> None:
    operation = served.operation
    reply = operation.hints["return"]
    app.add_api_route(
        operation.path,
        _endpoint(border, served),
        methods=[operation.method],
        status_code=operation.status,
        operation_id=operation.name,
        summary=(operation.declaration.__doc__ or "").split("\n")[0],
        response_model=None,
        responses={operation.status: {"model": reply}},
        openapi_extra=_request_schema(operation),
    )


def _request_schema(operation: Operation[..., Any]) -> dict[str, Any]:
    if operation.body_parameter is None:
        return {}
    schema = operation.body_parameter[1].model_json_schema()
    media = "multipart/form-data" if operation.is_form else "application/json"
    return {"requestBody": {"required": True, "content": {media: {"schema": schema}}}}


def _endpoint(border: Border, served: Served) -> Callable[[Request], Awaitable[Response]]:
    in_flight = border.generations if served.is_async else border.uploads

    async def answer(request: Request) -> Response:
        principal: Principal = request.state.principal
        try:
            principal.require(served.operation.scope)
            _check_rate(border, request)
            if not (served.is_async or served.operation.is_form):
                return await _run(border, served, request)
            with in_flight.slot(principal.client_id):
                return await _run(border, served, request)
        except Exception as error:  # noqa: BLE001 - the last line of defence: it logs and answers
            return _error_response(request, _refusal_of(request, error))

    return answer


def _check_rate(border: Border, request: Request) -> None:
    window: RateWindow | None = request.state.window
    if window is not None and window.exceeded:
        wait = math.ceil(window.reset - border.parts.clock().timestamp())
        raise RateLimitExceeded("too many requests in this minute", retry_after=max(1, wait))


async def _run(border: Border, served: Served, request: Request) -> Response:
    operation = served.operation
    context = Context(
        parts=border.parts,
        client_id=request.state.principal.client_id,
        request_id=request.state.request_id,
        if_match=request.headers.get("if-match"),
        routing_key=request.headers.get("x-routing-key"),
    )
    async with _content(operation, request) as content:
        arguments = _arguments(operation, request, content)
        if served.is_async:
            reply = await served.handler(context, **arguments)
            return _reply(operation, reply, context)
        key = _idempotency_key(operation, request, content.digest)
        return await asyncio.to_thread(_in_transaction, border, served, context, arguments, key)


def _in_transaction(
    border: Border,
    served: Served,
    context: Context,
    arguments: dict[str, Any],
    key: idempotency.Key | None,
) -> Response:
    """Run a handler in one transaction together with its idempotency row."""
    database = border.parts.database
    hold: idempotency.Hold | None = None
    if key is not None:
        with database.write() as connection:
            stored = idempotency.begin(connection, key, context.now)
        if isinstance(stored, idempotency.StoredAnswer):
            return _stored_response(stored)
        hold = stored
    try:
        response = _reply(served.operation, served.handler(context, **arguments), context)
        if hold is not None:
            answer = idempotency.StoredAnswer(
                response.status_code, response.headers.get("location"), bytes(response.body)
            )
            idempotency.finish(context.transaction, hold, answer)
        committed = context.commit()
    except BaseException as error:
        context.roll_back(error)
        if hold is not None:
            with database.write() as connection:
                idempotency.abandon(connection, hold)
        raise
    if committed:
        border.wake()
    return response


def _idempotency_key(
    operation: Operation[..., Any], request: Request, digest: str
) -> idempotency.Key | None:
    given = request.headers.getlist("idempotency-key")
    if not given or (operation.is_form and not operation.is_creating):
        return None
    if operation.method not in ("POST", "PATCH"):
        return None
    if len(given) > 1 or not KEY_SHAPE.fullmatch(given[0]):
        raise InvalidRequestError("Idempotency-Key must be 1 to 255 printable ASCII characters")
    text = f"{operation.method}\n{request.url.path}\n{digest}"
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return idempotency.Key(request.state.principal.client_id, given[0], fingerprint)


def _stored_response(stored: idempotency.StoredAnswer) -> Response:
    response = Response(stored.body, stored.status, media_type="application/json")
    response.headers["Idempotent-Replayed"] = "true"
    if stored.location:
        response.headers["Location"] = stored.location
    return response


def _reply(operation: Operation[..., Any], reply: Any, context: Context) -> Response:
    body = operation.reply_type.dump_json(reply, by_alias=True)
    response = Response(body, operation.status, media_type="application/json")
    response.headers.update(context.headers)
    if operation.is_creating:
        response.headers["Location"] = f"{operation.path.removesuffix('/merge')}/{reply.id}"
    return response


@dataclass(frozen=True)
class _Content:
    """What a request carries: fields, perhaps a file, and a digest of both for the idempotency fingerprint."""

    fields: dict[str, Any]
    digest: str = ""
    file: Any = None


def _arguments(
    operation: Operation[..., Any], request: Request, content: _Content
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


@asynccontextmanager
async def _content(operation: Operation[..., Any], request: Request) -> AsyncGenerator[_Content]:
    """Body or form; an uploaded file lives as long as the block."""
    if operation.is_form:
        form = await _form(request)
        try:
            yield await asyncio.to_thread(_form_content, operation, form)
        finally:
            await form.close()
    elif operation.body_parameter is None:
        await _no_fields(request)
        yield _Content({})
    else:
        body = await _json_body(request)
        yield _Content(json_object(body), hashlib.sha256(body).hexdigest())


async def _json_body(request: Request) -> bytes:
    _check_length(request, JSON_BODY_LIMIT)
    headers = request.headers
    check_json_media(headers.get("content-type", ""), encoded="content-encoding" in headers)
    return b"".join([block async for block in _limited(request, JSON_BODY_LIMIT)])


async def _no_fields(request: Request) -> None:
    """An operation without fields needs no body; one that comes must be an empty object."""
    if request.headers.get("content-length", "0") == "0" and not request.headers.get(
        "transfer-encoding"
    ):
        return
    if json_object(await _json_body(request)):
        raise InvalidRequestError("this operation takes no field")


async def _limited(request: Request, limit: int) -> AsyncGenerator[bytes]:
    """The body as it arrives; cut off at `limit` when its length was not announced."""
    size = 0
    async for block in request.stream():
        size += len(block)
        if size > limit:
            raise InvalidRequestError(f"the body is larger than {limit >> 20} MiB", status=413)
        yield block


def _check_length(request: Request, limit: int) -> None:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise InvalidRequestError(f"the body is larger than {limit >> 20} MiB", status=413)


async def _form(request: Request) -> FormData:
    _check_length(request, FILE_LIMIT)
    media = request.headers.get("content-type", "")
    if not media.startswith("multipart/form-data") or "content-encoding" in request.headers:
        raise InvalidRequestError("the body must be multipart/form-data", status=415)
    ending = bytearray()

    async def blocks() -> AsyncGenerator[bytes]:
        async for block in _limited(request, FILE_LIMIT):
            ending.extend(block[-256:])
            del ending[:-256]
            yield block

    parser = MultiPartParser(
        request.headers, blocks(), max_files=2, max_fields=16, max_part_size=1 << 16
    )
    try:
        form = await parser.parse()
    except BaseException as error:
        _close_parts(parser)
        if isinstance(error, MultiPartException | LookupError | ValueError):
            raise InvalidRequestError("the multipart form cannot be parsed") from None
        raise
    if form_end(media) not in ending:  # the parser takes a form without its end
        _close_parts(parser)
        raise InvalidRequestError("the multipart form is cut off")
    return form


def _close_parts(parser: MultiPartParser) -> None:
    """The parser closes its files only after errors of its own kind."""
    for file in getattr(parser, "_files_to_close_on_error", ()):
        file.close()


def _form_content(operation: Operation[..., Any], form: FormData) -> _Content:
    parts: dict[str, list[Any]] = {}
    for name, value in form.multi_items():
        parts.setdefault(name, []).append(value)
    files = parts.pop("file", [])
    if len(files) != 1 or not isinstance(files[0], UploadFile):
        raise InvalidRequestError("exactly one part named file is required", param="file")
    if any(len(values) > 1 for values in parts.values()):
        raise InvalidRequestError("a form part is given twice")
    fields = {name: values[0] for name, values in parts.items()}
    if "tags" in fields and operation.is_creating:
        fields["tags"] = form_tags(fields["tags"])
    check_file_media(files[0].content_type)
    file: Any = files[0].file
    return _Content(fields, _form_digest(fields, file), file)


def _form_digest(fields: dict[str, Any], file: Any) -> str:
    """Names, values and the file's digest: the raw body holds a boundary that changes with every try."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    while block := file.read(1 << 20):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def _error_response(request: Request, error: ApiError) -> Response:
    response = _json_response(error.status, error.as_json(request.state.request_id))
    response.headers.update(error.headers)
    response.headers["X-Should-Retry"] = "true" if error.retryable else "false"
    wait = (
        error.retry_after if error.retry_after is not None else (1 if error.status == 503 else None)
    )
    if wait is not None:
        response.headers["Retry-After"] = str(wait)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in CLOSING:
        response.headers["Connection"] = "close"
    return response


def _json_response(status: int, body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
