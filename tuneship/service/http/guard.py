"""Every request first: an id, its framing, the caller, the rate window; and the headers of every answer."""

import asyncio
import logging
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from ipaddress import IPv6Address, ip_address
from typing import Any, cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneship.contract.errors import AuthenticationError, InternalError, InvalidRequestError
from tuneship.contract.operation import DECLARED
from tuneship.service.body import Patience
from tuneship.service.http.answers import error_response, refusal_of
from tuneship.service.http.border import Border
from tuneship.service.rates import RateWindow
from tuneship.service.trail import OPAQUE_ID
from tuneship.store.audit import NOBODY, AuditEntry
from tuneship.store.identifiers import new_id

logger = logging.getLogger(__name__)

HEADER_LIMIT = 16 << 10
TARGET_LIMIT = 8 << 10
OPEN_PATHS = {"/openapi.json", "/healthz", "/readyz"}


class Guard:
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
                self._refuse_newcomers()
                await self._authenticate(request)
            await self._app(scope, Patience(scope, receive).receive, answer.send)
        except Exception as error:
            if answer.status:  # half an answer is out: only the server can break the connection
                raise
            response = error_response(request, refusal_of(request, error))
            if response.status_code in (400, 503):
                # Nothing after wrong framing can be trusted; nobody stays with a service that goes away.
                response.headers["Connection"] = "close"
            await response(scope, receive, answer.send)
        finally:
            _log_access(scope, state["request_id"], answer.status, started)

    def _refuse_newcomers(self) -> None:
        if self._border.parts.drain.has_begun:
            raise InternalError("the service is shutting down", status=503, retry_after=1)

    async def _authenticate(self, request: Request) -> None:
        border, address = self._border, request.client.host if request.client else ""
        border.limits.check_source(address)
        headers = request.headers
        given = headers.getlist("authorization"), headers.getlist("x-client-id")
        try:
            if border.keys.is_at_hand(given[0]):  # nearly always: a thread would cost more
                principal = border.keys.recognise(*given)
            else:
                principal = await asyncio.to_thread(border.keys.recognise, *given)
        except AuthenticationError:
            is_written = border.limits.count_failure(address)
            if is_written and given[0]:  # who shows no key at all has not tried one
                await asyncio.to_thread(self._write_down, request)
            raise
        request.state.principal = principal
        kind = "generate" if request.scope["path"].endswith("/generate") else "control"
        request.state.window = border.limits.count(principal.client_id, kind)

    def _write_down(self, request: Request) -> None:
        """A key that was refused, and nothing of it: what somebody guesses may be somebody's key."""
        parts, request_id = self._border.parts, request.state.request_id
        refused = (NOBODY, "", "authenticate", None, 401, address_of(request), request_id)
        with parts.database.write() as connection:
            parts.audit.add(connection, AuditEntry(parts.clock(), *refused))


class _Answer:
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
        await self._send(message)


def address_of(request: Request) -> str:
    """Where the request came from; empty when a proxy says something that is no address."""
    with suppress(ValueError):
        address = ip_address(request.client.host if request.client else "")
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return str(address)
    return ""


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
    if not 0 < status < 400:
        path = "/".join(part if _is_ours(part) else "*" for part in path.split("/"))
    took_ms = (time.perf_counter() - started) * 1000
    logger.info("%s %s %s %d %.0f ms", request_id, scope["method"], path, status, took_ms)


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
