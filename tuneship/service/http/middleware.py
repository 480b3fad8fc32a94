"""The middleware of every request: its id, framing, authentication and rate window, and the headers of its answer."""

import asyncio
import logging
import time
from collections.abc import MutableMapping, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneship.contract.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    RateLimitExceeded,
)
from tuneship.service.access.api_keys import NOT_VALID, Principal
from tuneship.service.access.audit_facts import OPAQUE_ID
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.contexts import record_failure
from tuneship.service.http.dialect import Dialect
from tuneship.service.http.forwarding import source_of
from tuneship.service.http.rate_limits import RateWindow
from tuneship.service.http.request_spans import request_span
from tuneship.service.http.responses import error_response
from tuneship.service.http.sockets.body_timeout import BodyTimeout
from tuneship.service.http.sockets.connections import CONNECTION, Connection
from tuneship.service.telemetry.request_counts import NO_CLIENT, NO_OPERATION
from tuneship.store.database.identifiers import new_id

logger = logging.getLogger(__name__)
# Logs the requests without a key, which anybody can make: the server lets through a few lines a
# second and counts the others.
KEYLESS = f"{__name__}.keyless"
keyless_logger = logging.getLogger(KEYLESS)

MAX_HEADER_BYTES = 16 << 10
MAX_TARGET_BYTES = 8 << 10
# An answer is sent in pieces of this size, so that no more of it waits in memory for a slow reader.
PIECE_BYTES = 64 << 10


class EntryMiddleware:
    """Wraps the application: authenticates and logs every request, and turns every exception into an answer."""

    def __init__(self, app: ASGIApp, boundary: Boundary, dialects: Sequence[Dialect]) -> None:
        self._app = app
        self._boundary = boundary
        self._dialects = dialects
        self._reading_ids = asyncio.Lock()
        self._api_words = {
            part
            for dialect in dialects
            for path in (*(operation.path for operation in dialect.declared), *dialect.open_paths)
            for part in path.split("/")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = cast("MutableMapping[str, Any]", scope.setdefault("state", {}))
        state["request_id"] = new_id("req")
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        path = scope["path"]
        dialect = next(one for one in self._dialects if path.startswith(one.prefix))
        state["dialect"] = dialect
        started = time.perf_counter()
        request, answer = Request(scope), _CommonHeaders(scope, send, started)
        try:
            _check_framing(scope)
            if path not in dialect.open_paths:
                await self._authenticate(request, dialect)
            await self._app(scope, BodyTimeout(scope, receive).receive, answer.send)
        except Exception as error:
            if answer.status:  # half an answer is out: only the server can break the connection
                raise
            response = error_response(request, error)
            if response.status_code in (400, 503):
                # After wrong framing the rest of the connection cannot be trusted; and a service
                # that drains keeps no connection.
                response.headers["Connection"] = "close"
            await response(scope, receive, answer.send)
        finally:
            log = logger if "principal" in state else keyless_logger
            self._log_access(log, scope, answer.status, started)
            self._count(scope, answer.status, started)

    async def _authenticate(self, request: Request, dialect: Dialect) -> None:
        """Find the caller, and show the connection whether there is one. Raises `AuthenticationError`, or
        `RateLimitExceeded` after too many failures. While the service drains, nobody passes (503).
        """
        if self._boundary.parts.drain.has_begun:
            raise InternalError("the service is shutting down", status=503, retry_after=1)
        connection: Connection | None = request.scope["state"].get(CONNECTION)
        try:
            if dialect.authenticate is None:
                await self._authenticate_by_key(request, dialect)
            else:
                request.state.principal = await dialect.authenticate(self._boundary, request)
        finally:
            if connection is not None:
                # A caller over its limit has a valid key all the same.
                connection.show_key(is_valid="principal" in request.scope["state"])

    async def _authenticate_by_key(self, request: Request, dialect: Dialect) -> None:
        """Find the caller by its key, and count the request.

        Only failures are limited. A good key passes from an address that has failed too often: behind it may be a
        whole hospital, with one stale agent.
        """
        limits = self._boundary.limits
        source = source_of(request.client.host if request.client else "")
        failures = limits.failures(source)
        given = dialect.credentials(request)
        try:
            principal = await self._principal_of(*given, is_limited=failures.exceeded)
        except AuthenticationError:
            request.state.window = limits.count_failure(source)
            if failures.exceeded:
                text = "too many failed authentications"
                raise RateLimitExceeded(text, retry_after=failures.retry_after) from None
            # A request without any key is no attempt at one.
            if given[0] and limits.count_audited_failure():
                await asyncio.to_thread(record_failure, self._boundary, request)
            raise
        request.state.principal = principal
        generating = ("/generate", "/embeddings", *dialect.generating)
        kind = "generate" if request.scope["path"].endswith(generating) else "control"
        request.state.window = await limits.counted(principal.client_id, kind)
        dialect.check_client(request, principal.client_id)

    async def _principal_of(
        self, given: list[str], clients: list[str] | None, *, is_limited: bool
    ) -> Principal:
        """The caller. Raises `AuthenticationError`."""
        keys = self._boundary.keys
        if keys.is_cached(given):  # nearly always: a thread would cost more
            return keys.authenticate(given, clients)
        if is_limited:
            # An address that guesses must not cause a query for each key that it makes up. One
            # request reads the ids of all keys, the others use them.
            async with self._reading_ids:
                if not keys.has_fresh_ids():
                    await asyncio.to_thread(keys.is_issued, given)
            if not keys.is_issued(given):
                raise AuthenticationError(NOT_VALID)
        return await asyncio.to_thread(keys.authenticate, given, clients)

    def _count(self, scope: Scope, status: int, started: float) -> None:
        """Count the request for the metrics, and send its span if there is a collector."""
        parts, state = self._boundary.parts, scope["state"]
        client_id = state["principal"].client_id if "principal" in state else NO_CLIENT
        operation = state["operation"].name if "operation" in state else NO_OPERATION
        took_s = time.perf_counter() - started
        parts.request_counts.count(client_id, operation, status, took_s)
        if parts.tracing is not None:
            span = request_span(scope, status, started, parts.clock())
            if span is not None:
                parts.tracing.record(span)

    def _log_access(self, log: logging.Logger, scope: Scope, status: int, started: float) -> None:
        """Log one line for each request: the path as it was encoded, never the query, a header or a body."""
        path = (scope.get("raw_path") or b"").partition(b"?")[0][:128].decode("ascii", "replace")
        if not 0 < status < 400 or "principal" not in scope["state"]:
            # The path of a refused request, or of one that leads to a sign-in, may hold anything, also a name: only
            # words of the API and opaque ids are logged.
            path = "/".join(
                part if part in self._api_words or OPAQUE_ID.fullmatch(part) else "*"
                for part in path.split("/")
            )
        took_ms = (time.perf_counter() - started) * 1000
        request_id = scope["state"]["request_id"]
        log.info("%s %s %s %d %.0f ms", request_id, scope["method"], path, status, took_ms)


class _CommonHeaders:
    """Puts the common headers on an answer and remembers its status."""

    def __init__(self, scope: Scope, send: Send, started: float) -> None:
        self._state: MutableMapping[str, Any] = scope["state"]
        self._send = send
        self._started = started
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            window: RateWindow | None = self._state.get("window")
            headers = {"X-Request-ID": self._state["request_id"]}
            headers |= self._state["dialect"].answer_headers(self._state, self._started)
            for name, value in {**headers, **(window.headers if window else {})}.items():
                message["headers"].append((name.lower().encode(), value.encode()))
        body: bytes = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await self._send(message)
            return
        has_more = message.get("more_body", False)
        # Between two pieces the server waits for a slow reader.
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            piece = {**message, "body": body[start:end], "more_body": has_more or end < len(body)}
            await self._send(piece)


def _check_framing(scope: Scope) -> None:
    """Refuse bad framing that the HTTP server lets through."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADER_BYTES:
        raise InvalidRequestError("the headers are larger than 16 KiB", status=431)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise InvalidRequestError("the address is longer than 8 KiB", status=414)
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise InvalidRequestError("the length of the body is given twice")
