"""The main API, which has every address that no other dialect has, with the health checks and the document."""

import asyncio
import json
from collections.abc import Sequence
from functools import cache, lru_cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tuneship.contract.declaring.operation import DECLARED
from tuneship.contract.document import openapi
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.dialect import Dialect
from tuneship.service.http.health import Readiness, alive
from tuneship.service.http.routes import route


def _credentials(request: Request) -> tuple[list[str], list[str] | None]:
    keys = request.headers.getlist("authorization")
    clients = request.headers.getlist("x-client-id")
    is_key_enough = request.scope["path"] in _paths_for_a_key_alone()
    return keys, clients or (None if is_key_enough else [])


@cache
def _paths_for_a_key_alone() -> frozenset[str]:
    """The addresses that need no client id; called when every operation is declared."""
    return frozenset(operation.path for operation in DECLARED if operation.takes_key_alone)


def _routes(boundary: Boundary) -> Sequence[Route]:
    parts = boundary.parts

    async def describe(_request: Request) -> Response:
        # Made for the first one who asks, on a thread: it takes longer than the rest of the start.
        body = await asyncio.to_thread(_described, parts.public_url, parts.settings.created_status)
        # The document is large and needs no key. One for each connection, so that nobody requests
        # hundreds of them and reads none.
        headers = {"Connection": "close"}
        return Response(body, media_type="application/json", headers=headers)

    return (
        route("GET", "/healthz", alive(parts.capabilities)),
        route("GET", "/readyz", Readiness(boundary).answer),
        route("GET", "/openapi.json", describe),
    )


@lru_cache(maxsize=4)
def _described(url: str, created_status: int) -> bytes:
    return json.dumps(openapi.document(url, created_status), ensure_ascii=False).encode()


MAIN = Dialect(
    prefix="",
    credentials=_credentials,
    declared=DECLARED,
    routes=_routes,
    open_paths=frozenset({"/openapi.json", "/healthz", "/readyz"}),
)
