"""Every request first: an id, its framing, the caller, the rate window; and the headers of every answer."""

import asyncio
import logging
import time
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any, cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneship.contract.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    RateLimitExceeded,
)
from tuneship.contract.operation import DECLARED
from tuneship.service.access.api_keys import Principal
from tuneship.service.access.audit_trail import OPAQUE_ID
from tuneship.service.http.answers import error_response, refusal_of
from tuneship.service.http.body_timeout import BodyTimeout
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.connections import CONNECTION, Connection
from tuneship.service.http.forwarding import plain_address, source_of
from tuneship.service.http.rate_limits import RateWindow
from tuneship.store.audit import NOBODY, AuditRecord
from tuneship.store.identifiers import new_id

logger = logging.getLogger(__name__)
# Logs the requests that anybody can make: the server lets through a few lines a second and counts
# the others.
KEYLESS = f"{__name__}.keyless"
keyless_logger = logging.getLogger(KEYLESS)

HEADER_LIMIT = 16 << 10
TARGET_LIMIT = 8 << 10
# Of an answer that waits in memory for its reader, at the most, beside what the system keeps.
PIECE_BYTES = 64 << 10
OPEN_PATHS = {"/openapi.json", "/healthz", "/readyz"}


class EntryMiddleware:
    """Every request first: an id, the caller, the rate window; and the headers of every answer."""

    def __init__(self, app: ASGIApp, boundary: Boundary) -> None:
        self._app = app
        self._boundary = boundary
        self._reading_ids = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = cast("MutableMapping[str, Any]", scope.setdefault("state", {}))
        state["request_id"] = new_id("req")
        request, answer = Request(scope), _CommonHeaders(state, send)
        started = time.perf_counter()
        try:
            _check_framing(scope)
            if len(scope["path"]) > 1:
                scope["path"] = scope["path"].rstrip("/") or "/"
            if scope["path"] not in OPEN_PATHS:
                self._refuse_newcomers()
                await self._authenticate(request)
            await self._app(scope, BodyTimeout(scope, receive).receive, answer.send)
        except Exception as error:
            if answer.status:  # half an answer is out: only the server can break the connection
                raise
            response = error_response(request, refusal_of(request, error))
            if response.status_code in (400, 503):
                # Nothing after wrong framing can be trusted; nobody stays with a service that goes away.
                response.headers["Connection"] = "close"
            await response(scope, receive, answer.send)
        finally:
            log = logger if "principal" in state else keyless_logger
            _log_access(log, scope, answer.status, started)

    def _refuse_newcomers(self) -> None:
        if self._boundary.parts.drain.has_begun:
            raise InternalError("the service is shutting down", status=503, retry_after=1)

    async def _authenticate(self, request: Request) -> None:
        """Know the caller by its key, or refuse it.

        Only failures are limited. A good key passes from an address that has failed too often: behind it may be a
        whole hospital, with one stale agent.
        """
        limits = self._boundary.limits
        source = source_of(request.client.host if request.client else "")
        failures = limits.failures(source)
        connection: Connection | None = request.scope["state"].get(CONNECTION)
        try:
            principal = await self._recognise(request, is_held_off=failures.exceeded)
        except AuthenticationError:
            if connection is not None:
                connection.show_key(is_valid=False)
            request.state.window = limits.count_failure(source)
            if failures.exceeded:
                text = "too many failed authentications"
                raise RateLimitExceeded(text, retry_after=failures.retry_after) from None
            # Who shows no key at all has not tried one.
            if request.headers.getlist("authorization") and limits.count_written():
                await asyncio.to_thread(self._write_down, request)
            raise
        if connection is not None:
            connection.show_key(is_valid=True)
        request.state.principal = principal
        kind = "generate" if request.scope["path"].endswith("/generate") else "control"
        request.state.window = limits.count(principal.client_id, kind)

    async def _recognise(self, request: Request, *, is_held_off: bool) -> Principal:
        """Raises `AuthenticationError`; for an address that is held off, without a look-up for each key it makes up."""
        keys, headers = self._boundary.keys, request.headers
        given = headers.getlist("authorization"), headers.getlist("x-client-id")
        if keys.is_cached(given[0]):  # nearly always: a thread would cost more
            return keys.authenticate(*given)
        if is_held_off:
            async with self._reading_ids:  # one reads, the others find it done
                if not keys.has_fresh_ids():
                    await asyncio.to_thread(keys.is_issued, given[0])
            if not keys.is_issued(given[0]):
                raise AuthenticationError("the API key or the client id is not valid")
        return await asyncio.to_thread(keys.authenticate, *given)

    def _write_down(self, request: Request) -> None:
        """A key that was refused, and nothing of it: what somebody guesses may be somebody's key."""
        parts, request_id = self._boundary.parts, request.state.request_id
        refused = (NOBODY, "", "authenticate", None, 401, address_of(request), request_id)
        with parts.database.write() as connection:
            parts.audit.add(connection, AuditRecord(parts.clock(), *refused))


class _CommonHeaders:
    """Puts the common headers on an answer and remembers its status."""

    def __init__(self, state: Mapping[str, Any], send: Send) -> None:
        self._state = state
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in common_headers(self._state).items():
                message["headers"].append((name.lower().encode(), value.encode()))
        body: bytes = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await self._send(message)
            return
        goes_on = message.get("more_body", False)
        for start in range(0, len(body), PIECE_BYTES):  # the server waits for a slow reader between
            end = start + PIECE_BYTES
            piece = {**message, "body": body[start:end], "more_body": goes_on or end < len(body)}
            await self._send(piece)


def address_of(request: Request) -> str:
    """Where the request came from; empty when a proxy says something that is no address."""
    return plain_address(request.client.host if request.client else "")


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


def _log_access(log: logging.Logger, scope: Scope, status: int, started: float) -> None:
    """One line a request: the path as it was encoded, never the query, a header or a body."""
    path = (scope.get("raw_path") or b"").partition(b"?")[0][:128].decode("ascii", "replace")
    if not 0 < status < 400:
        path = "/".join(part if _is_ours(part) else "*" for part in path.split("/"))
    took_ms = (time.perf_counter() - started) * 1000
    request_id = scope["state"]["request_id"]
    log.info("%s %s %s %d %.0f ms", request_id, scope["method"], path, status, took_ms)


def _is_ours(part: str) -> bool:
    """Whether a word of a path is the API's or an id of ours: of a request that found nothing, others may be a name."""
    return part in _words() or OPAQUE_ID.fullmatch(part) is not None


@cache
def _words() -> set[str]:
    paths = (*(one.path for one in DECLARED), *OPEN_PATHS)
    return {part for path in paths for part in path.split("/")}


def common_headers(state: Mapping[str, Any]) -> dict[str, str]:
    window: RateWindow | None = state.get("window")
    return {"X-Request-ID": state["request_id"], **(window.headers if window else {})}
