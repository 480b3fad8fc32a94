"""Reads what a request carries: nothing, one JSON object, or a form with a file."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from tuneship.contract.errors import InvalidRequestError
from tuneship.contract.operation import Operation
from tuneship.service.arguments import check_json_media, json_object
from tuneship.service.context import Parts
from tuneship.service.http.forms import Content, check_length, limited, read_form

JSON_BODY_LIMIT = 1 << 20


@asynccontextmanager
async def content_of(
    operation: Operation[..., Any], request: Request, parts: Parts
) -> AsyncGenerator[Content]:
    """Body or form; an uploaded file is gone after the block unless it was kept."""
    if operation.is_form:
        with parts.blobs.staged() as staged:
            yield await read_form(operation, request, staged, parts.settings)
    elif operation.body_parameter is None:
        await _no_fields(request)
        yield Content({})
    elif _is_empty(request) and _may_be_empty(operation):
        yield Content({})
    else:
        body = await _json_body(request)
        yield Content(json_object(body), hashlib.sha256(body).hexdigest())


async def _json_body(request: Request) -> bytes:
    check_length(request, JSON_BODY_LIMIT)
    headers = request.headers
    check_json_media(headers.get("content-type", ""), encoded="content-encoding" in headers)
    return b"".join([block async for block in limited(request, JSON_BODY_LIMIT)])


def _is_empty(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _may_be_empty(operation: Operation[..., Any]) -> bool:
    """A POST without a required field may come without body and media type."""
    if operation.method != "POST" or operation.body_parameter is None:
        return False
    fields = operation.body_parameter[1].model_fields.values()
    return not any(field.is_required() for field in fields)


async def _no_fields(request: Request) -> None:
    """An operation without fields needs no body; one that comes must be an empty object."""
    if not _is_empty(request) and json_object(await _json_body(request)):
        raise InvalidRequestError("this operation takes no field")
