"""Reads what a request carries: nothing, one JSON object, or a form with a file.

A JSON body is read here and decoded by `parsed`: off the event loop, unless it is short.
"""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from tuneship.contract.errors import InvalidRequestError
from tuneship.contract.operation import Operation
from tuneship.service.context.context import Parts
from tuneship.service.http.arguments import check_json_media, json_object
from tuneship.service.http.forms import Content, Upload, check_length, limited, read_form

JSON_BODY_LIMIT = 1 << 20
# Bytes that are parsed within a millisecond: a thread would take longer.
SHORT_BODY = 4 << 10


@asynccontextmanager
async def content_of(
    operation: Operation[..., Any], request: Request, parts: Parts, client_id: str
) -> AsyncGenerator[Content]:
    """Body or form; an uploaded file is gone after the block unless it was kept."""
    if operation.is_form:
        with parts.blobs.staged() as staged:
            yield await read_form(operation, request, Upload(staged, parts, client_id))
    elif _is_empty(request) and _may_be_empty(operation):
        yield Content({})
    else:
        yield Content({}, body=await _json_body(request))


def parsed(operation: Operation[..., Any], content: Content) -> Content:
    """With the fields of its JSON body. A body of a megabyte takes some milliseconds."""
    if content.body is None:
        return content
    fields = json_object(content.body)
    if operation.body_parameter is None:
        if fields:
            raise InvalidRequestError("this operation takes no field")
        return Content({})
    return Content(fields, hashlib.sha256(content.body).hexdigest())


async def _json_body(request: Request) -> bytes:
    check_length(request, JSON_BODY_LIMIT)
    headers = request.headers
    check_json_media(headers.get("content-type", ""), encoded="content-encoding" in headers)
    return b"".join([block async for block in limited(request, JSON_BODY_LIMIT)])


def _is_empty(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _may_be_empty(operation: Operation[..., Any]) -> bool:
    """An operation without fields may come without body and media type, and a POST that requires none of its own."""
    if operation.body_parameter is None:
        return True
    if operation.method != "POST":
        return False
    fields = operation.body_parameter[1].model_fields.values()
    return not any(field.is_required() for field in fields)
