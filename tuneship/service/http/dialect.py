"""The differences between the APIs, or kinds of pages, that the boundary answers, each below a prefix of its own."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import ApiError, ResourceNotFound
from tuneship.service.access.api_keys import Principal
from tuneship.service.http.boundary import Boundary


@dataclass(frozen=True)
class Dialect:
    """One API, or one kind of pages. Its defaults are those of the main API (`main_api.py`)."""

    # The beginning of its addresses.
    prefix: str
    # The values that are sent as a key, and those that name the client; None where the key alone counts.
    credentials: Callable[[Request], tuple[list[str], list[str] | None]] = lambda _request: ([], [])
    # Finds the caller in place of a key. Raises `ApiError`.
    authenticate: Callable[[Boundary, Request], Awaitable[Principal]] | None = None
    # Raises `AuthenticationError` where a request names another client than its key's.
    check_client: Callable[[Request, str], None] = lambda _request, _client_id: None
    # Its operations, whether they are served or not.
    declared: Sequence[Operation[..., Any]] = ()
    # More routes than those of the operations, and the addresses that need no key.
    routes: Callable[[Boundary], Sequence[Route]] = lambda _boundary: ()
    open_paths: Set[str] = frozenset()
    # The ends of more addresses whose requests count as generations.
    generating: tuple[str, ...] = ()
    # The number of earlier tries of a request, where clients number them.
    retry_count: Callable[[Request], int | None] = lambda _request: None
    # An id in an address, in the form of the main API.
    stored_id: Callable[[str], str] = lambda identifier: identifier
    # More headers of every answer, by the state of the request and the time of its beginning.
    answer_headers: Callable[[Mapping[str, Any], float], Mapping[str, str]] = (
        lambda _state, _began: {}
    )
    # An error as its clients expect it, and its answer, with the id of the request.
    own_error: Callable[[Request, ApiError], ApiError] = lambda _request, error: error
    error_answer: Callable[[Request, ApiError, str], Response] = (
        lambda _request, error, request_id: json_response(error.status, error.as_json(request_id))
    )
    # The error for an address without a route.
    unknown_route: Callable[[], ApiError] = lambda: ResourceNotFound("there is no such route")


def json_response(status: int, body: dict[str, Any]) -> Response:
    """An answer in JSON."""
    return Response(json.dumps(body), status, media_type="application/json")
