"""Reads the content of a request: nothing, one JSON object, or a form with a file.

A JSON body is read here and decoded by `parsed`: off the event loop, unless it is short.
"""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import InvalidRequestError
from tuneship.service.context.arguments import check_json_media, json_object
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import staging
from tuneship.service.http.forms import Content, Upload, check_length, limited, read_form

JSON_BODY_BYTES = 1 << 20
# A body up to this size is parsed within a millisecond; handing it to a thread would take longer.
SHORT_BODY_BYTES = 4 << 10


@asynccontextmanager
async def content_of(
    operation: Operation[..., Any], request: Request, context: Context
) -> AsyncGenerator[Content]:
    """The body or form of a request. An uploaded file is removed after the block unless it was kept."""
    if operation.is_form:
        with staging(context) as staged:
            yield await read_form(Upload(staged, context, request, operation))
        return
    headers, body_parameter = request.headers, operation.body_parameter
    is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    # A request may come without body and media type where no field is taken, or a POST requires none.
    may_be_empty = body_parameter is None or (
        operation.method == "POST"
        and not any(field.is_required() for field in body_parameter[1].model_fields.values())
    )
    if is_empty and may_be_empty:
        yield Content({})
        return
    check_length(request, JSON_BODY_BYTES)
    check_json_media(headers.get("content-type", ""), encoded="content-encoding" in headers)
    body = b"".join([block async for block in limited(request, JSON_BODY_BYTES)])
    yield Content({}, body=body)


def parsed(operation: Operation[..., Any], content: Content) -> Content:
    """The content with the fields of its JSON body. A body of a megabyte takes some milliseconds."""
    if content.body is None:
        return content
    fields = json_object(content.body, operation.most_values)
    if operation.body_parameter is None:
        if fields:
            raise InvalidRequestError("this operation takes no field")
        return Content({})
    return Content(fields, hashlib.sha256(content.body).hexdigest())
