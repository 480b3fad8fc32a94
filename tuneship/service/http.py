"""The one file that knows FastAPI: binds every declared operation to its handler and keeps the border strict.

Order of checks: authentication, route, scope, rate, size, media type, syntax, fields, then the handler. What happens
inside an operation is in the resource's own file.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneship.contract import strict_json
from tuneship.contract.common import SERVICE
from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    RateLimitExceeded,
    ResourceNotFound,
    ValidationRefused,
)
from tuneship.contract.operation import Operation
from tuneship.service.access import Keys, Principal, RateLimits, RateWindow
from tuneship.service.context import Context, Parts
from tuneship.service.refusals import refusal, refused
from tuneship.service.resources import SERVED
from tuneship.service.serving_table import Served
from tuneship.store import idempotency
from tuneship.store.identifiers import new_id

logger = logging.getLogger(__name__)

JSON_BODY_LIMIT = 1 << 20
FILE_LIMIT = 2 << 30
OPEN_PATHS = {"/openapi.json", "/healthz", "/readyz"}
KEY_SHAPE = re.compile(r"[\x20-\x7e]{1,255}")
CONCURRENT_GENERATIONS = 64


@dataclass(frozen=True)
class Border:
    """What the boundary needs beside the handlers' parts."""

    parts: Parts
    keys: Keys
    limits: RateLimits
    wake: Callable[[], None]
    """Tells the supervisor that something was committed."""


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


def _healthy(parts: Parts) -> Callable[[], Awaitable[Response]]:
    async def health() -> Response:
        def query() -> None:
            with parts.database.read() as connection:
                connection.exec_driver_sql("select 1")

        await asyncio.to_thread(query)
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
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        state = cast("MutableMapping[str, Any]", scope.setdefault("state", {}))
        state["request_id"] = new_id("req")
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                for name, value in _common_headers(state).items():
                    message["headers"].append((name.lower().encode(), value.encode()))
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                await self._authenticate(request)
            await self._app(scope, receive, send_with_headers)
        except ApiError as error:
            await _error_response(request, error)(scope, receive, send_with_headers)

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


class _InFlight:
    """How many generations of each client run now."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @contextmanager
    def slot(self, client_id: str) -> Generator[None]:
        if self._running[client_id] >= CONCURRENT_GENERATIONS:
            raise RateLimitExceeded("too many generations at the same time", retry_after=1)
        self._running[client_id] += 1
        try:
            yield
        finally:
            self._running[client_id] -= 1


def _endpoint(border: Border, served: Served) -> Callable[[Request], Awaitable[Response]]:
    in_flight = _InFlight()

    async def answer(request: Request) -> Response:
        principal: Principal = request.state.principal
        try:
            principal.require(served.operation.scope)
            _check_rate(border, request)
            if not served.is_async:
                return await _run(border, served, request)
            with in_flight.slot(principal.client_id):
                return await _run(border, served, request)
        except ApiError as error:
            return _error_response(request, error)
        except ClientDisconnect:
            return _error_response(request, InvalidRequestError("the body broke off", status=408))
        except Exception:  # the last line of defence: no traceback ever leaves the service
            logger.exception("unexpected failure", extra={"request_id": request.state.request_id})
            return _error_response(request, InternalError("the service failed unexpectedly"))

    return answer


def _check_rate(border: Border, request: Request) -> None:
    window: RateWindow | None = request.state.window
    if window is not None and window.exceeded:
        wait = math.ceil(window.reset - border.parts.clock().timestamp())
        raise RateLimitExceeded("too many requests in this minute", retry_after=max(1, wait))


async def _run(border: Border, served: Served, request: Request) -> Response:
    operation = served.operation
    arguments, digest = await _arguments(operation, request)
    context = Context(
        parts=border.parts,
        client_id=request.state.principal.client_id,
        request_id=request.state.request_id,
        if_match=request.headers.get("if-match"),
        routing_key=request.headers.get("x-routing-key"),
    )
    if served.is_async:
        reply = await served.handler(context, **arguments)
        return _reply(operation, reply, context)
    key = _idempotency_key(operation, request, digest)
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
    if key is not None:
        with database.write() as connection:
            stored = idempotency.begin(connection, key, context.now)
        if stored is not None:
            return _stored_response(stored)
    try:
        response = _reply(served.operation, served.handler(context, **arguments), context)
        if key is not None:
            answer = idempotency.StoredAnswer(
                response.status_code, response.headers.get("location"), bytes(response.body)
            )
            idempotency.finish(context.transaction, key, answer)
        committed = context.commit()
    except BaseException as error:
        context.roll_back(error)
        if key is not None:
            with database.write() as connection:
                idempotency.abandon(connection, key)
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


async def _arguments(
    operation: Operation[..., Any], request: Request
) -> tuple[dict[str, Any], str]:
    """The handler's arguments, and a digest of the content for the idempotency fingerprint."""
    content, digest = await _content(operation, request)
    arguments = {**_path_arguments(operation, request), **_query_arguments(operation, request)}
    if operation.body_parameter is not None:
        name, model = operation.body_parameter
        arguments[name] = _validated(model, content.pop("", content))
    if operation.file_parameter is not None:
        arguments[operation.file_parameter] = content["file"]
    return arguments, digest


def _validated(model: type[BaseModel], fields: Any) -> BaseModel:
    try:
        return model.model_validate(fields, context=SERVICE, by_alias=True, by_name=False)
    except ValidationError as error:
        raise refusal(error) from None


def _path_arguments(operation: Operation[..., Any], request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in operation.path_parameters:
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(operation.hints[name])
            found[name] = adapter.validate_python(request.path_params[name], context=SERVICE)
        except ValidationError:
            raise ResourceNotFound("there is no such resource") from None
    return found


def _query_arguments(operation: Operation[..., Any], request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    lists = {
        name for name, hint in operation.hints.items() if "list[" in str(hint) and name != "return"
    }
    for raw, value in request.query_params.multi_items():
        name, bracket, key = raw.partition("[")
        if bracket and name in operation.hints and key.endswith("]") and "[" not in key:
            if name in lists and key == "]":
                fields.setdefault(name, []).extend(value.split(","))
            else:
                tags = fields.setdefault(name, {})
                tags[key[:-1]] = value
        elif raw in lists:
            fields.setdefault(raw, []).extend(value.split(","))
        elif raw in fields:
            raise refused(raw, "must be given once")
        else:
            fields[raw] = _scalar(operation, raw, value)
    try:
        model = operation.query_model.model_validate(fields, context=SERVICE)
    except ValidationError as error:
        raise refusal(error) from None
    return {name: getattr(model, name) for name in type(model).model_fields}


def _scalar(operation: Operation[..., Any], name: str, value: str) -> Any:
    """Only `true` and `false` are booleans, only plain digits are integers."""
    hint = str(operation.hints.get(name))
    if "bool" in hint:
        if value not in ("true", "false"):
            raise refused(name, "must be true or false")
        return value == "true"
    if "int" in hint and not re.fullmatch(r"-?\d{1,19}", value):
        raise refused(name, "must be a whole number")
    if "datetime" in hint and not re.search(r"(Z|[+-]\d\d:?\d\d)$", value):
        raise refused(name, "must be an RFC 3339 time with a zone")
    return value


async def _content(operation: Operation[..., Any], request: Request) -> tuple[dict[str, Any], str]:
    """Body or form; a JSON body that is not an object stays under the key ''."""
    if operation.is_form:
        return await _form(operation, request)
    if operation.body_parameter is None:
        return {}, ""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" or "content-encoding" in request.headers:
        raise InvalidRequestError("the body must be application/json", status=415)
    body = await _limited_body(request)
    try:
        value = strict_json.parse(body)
    except strict_json.JsonRefused as fault:
        if fault.fault == "nul":
            raise ValidationRefused(f"the body {fault.message}") from None
        raise InvalidRequestError(f"the body {fault.message}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return {"": value}, hashlib.sha256(body).hexdigest()


async def _limited_body(request: Request) -> bytes:
    _check_length(request, JSON_BODY_LIMIT)
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > JSON_BODY_LIMIT:
            raise InvalidRequestError("the body is larger than 1 MiB", status=413)
    return bytes(body)


def _check_length(request: Request, limit: int) -> None:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise InvalidRequestError(f"the body is larger than {limit >> 20} MiB", status=413)


async def _form(operation: Operation[..., Any], request: Request) -> tuple[dict[str, Any], str]:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError("the body must be multipart/form-data", status=415)
    _check_length(request, FILE_LIMIT)
    try:
        form = await request.form(max_files=2, max_fields=16, max_part_size=1 << 16)
    except (HTTPException, MultiPartException):
        raise InvalidRequestError("the multipart form cannot be parsed") from None
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
        fields["tags"] = _form_tags(fields["tags"])
    file: Any = files[0].file
    digest = await asyncio.to_thread(_form_digest, fields, file)
    return {**fields, "file": file, "": fields}, digest


def _form_digest(fields: dict[str, Any], file: Any) -> str:
    """Names, values and the file's digest: the raw body holds a boundary that changes with every try."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    while block := file.read(1 << 20):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def _form_tags(text: object) -> Any:
    try:
        return strict_json.parse(str(text).encode())
    except strict_json.JsonRefused as fault:
        raise refused("tags", fault.message) from None


def _error_response(request: Request, error: ApiError) -> Response:
    response = _json_response(error.status, error.as_json(request.state.request_id))
    response.headers["X-Should-Retry"] = "true" if error.retryable else "false"
    wait = (
        error.retry_after if error.retry_after is not None else (1 if error.status == 503 else None)
    )
    if wait is not None:
        response.headers["Retry-After"] = str(wait)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json_response(status: int, body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
