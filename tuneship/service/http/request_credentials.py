"""Reads from a request the key of its caller, and the client that it names."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from starlette.datastructures import Headers

from tuneship.contract.operation import DECLARED
from tuneship.service.http.openai import is_openai


def credentials(scope: Mapping[str, Any], headers: Headers) -> tuple[list[str], list[str] | None]:
    """The values of `Authorization` and of `X-Client-ID`; None for the second where the key alone counts."""
    given = headers.getlist("authorization"), headers.getlist("x-client-id")
    if is_openai(scope):
        # Azure's clients send the key alone.
        keys = given[0] or [f"Bearer {key}" for key in headers.getlist("api-key")]
        return keys, given[1] or None
    if scope["path"] in _paths_for_a_key_alone():
        return given[0], given[1] or None
    return given


@cache
def _paths_for_a_key_alone() -> frozenset[str]:
    """The addresses of the main API that need no client id; called when every operation is declared."""
    return frozenset(operation.path for operation in DECLARED if operation.takes_key_alone)
