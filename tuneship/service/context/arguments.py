"""Reads an operation's arguments from plain path, query and body values, as strictly as the contract says.

Knows no HTTP framework: it gets text and bytes. `answers/field_errors.py` makes the errors of the API.
"""

import re
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from email.message import Message
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from tuneship.contract.common import SERVICE
from tuneship.contract.declaring.operation import JSON_LINES, TAR, FileMedia, Operation
from tuneship.contract.errors import (
    ErrorDetail,
    InvalidRequestError,
    ModelNotFound,
    ResourceNotFound,
    ValidationFailed,
)
from tuneship.contract.lines import strict_json
from tuneship.service.answers.field_errors import DECLARED_NAME, error_from_pydantic, field_error

M = TypeVar("M", bound=BaseModel)

WHOLE = re.compile(r"-?[0-9]{1,19}")
ZONED = re.compile(r".*(Z|[+-]\d\d:?\d\d)", re.ASCII)
JSON_CHARSETS = (None, "utf-8", "utf8")
FILE_TYPES = {
    JSON_LINES: (
        *(None, "application/jsonl", "application/x-ndjson", "application/octet-stream"),
        "text/plain",
    ),
    TAR: (None, "application/x-tar", "application/octet-stream"),
}
# Making an adapter takes longer than the rest of a GET.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def path_arguments(operation: Operation[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The ids in the path. Raises `ResourceNotFound` or `ModelNotFound` for text that cannot be an id."""
    arguments: dict[str, Any] = {}
    for name in operation.path_parameters:
        adapter = _adapter(operation.hints[name])
        try:
            arguments[name] = adapter.validate_python(given[name], context=SERVICE)
        except ValidationError:
            if name == "model_id":
                text = "model_id names a model that does not exist"
                raise ModelNotFound(text, param=name) from None
            raise ResourceNotFound("there is no such resource") from None
    return arguments


def query_arguments(
    operation: Operation[..., Any], pairs: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The values of the query, with defaults for missing ones; `tags[k]=v` makes an object."""
    parameters = operation.query_model.model_fields
    for raw, _ in pairs:
        if raw.partition("[")[0] not in parameters:
            # A name that no operation could have is not echoed: it may be a patient's.
            named = raw if DECLARED_NAME.fullmatch(raw) else None
            fault = "is not a parameter of this operation"
            details = [ErrorDetail(named, "unknown_field", fault)]
            text = f"{named or 'a name in the query'} {fault}"
            raise InvalidRequestError(text, param=named, details=details)

    fields: dict[str, Any] = {}
    for raw, value in pairs:
        name, bracket, key = raw.partition("[")
        kinds = _kinds(operation.hints[name])
        if list in kinds and key in ("", "]"):
            fields.setdefault(name, []).extend(value.split(","))
        elif dict in kinds:
            members: dict[str, str] = fields.setdefault(name, {})
            member = key[:-1]
            if not member or key[-1] != "]" or "[" in member or "]" in member:
                raise field_error(name, f"must be sent as {name}[key]=value")
            if member in members:
                raise field_error(name, "must name each key once")
            members[member] = value
        elif bracket or name in fields:
            raise field_error(name, "must be given once")
        else:
            fields[name] = _scalar(kinds, name, value)
    model = validated(operation.query_model, fields)
    return {name: getattr(model, name) for name in parameters}


@cache
def _kinds(hint: Any) -> frozenset[type]:
    """The plain types of a parameter: `Annotated[int, ...] | None` is `int`."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset(kind for member in get_args(hint) for kind in _kinds(member))
    origin = get_origin(hint) or hint
    return frozenset({origin}) if isinstance(origin, type) else frozenset()


def _scalar(kinds: frozenset[type], name: str, value: str) -> Any:
    """The text of one value. Only `true` and `false` are booleans, only plain digits are integers."""
    if bool in kinds:
        if value not in ("true", "false"):
            raise field_error(name, "must be true or false")
        return value == "true"
    if int in kinds and not WHOLE.fullmatch(value):
        raise field_error(name, "must be a whole number")
    if datetime in kinds and not ZONED.fullmatch(value):
        raise field_error(name, "must be an RFC 3339 time with a zone")
    return value


def validated(model: type[M], fields: Any) -> M:
    """The fields as a model. Raises 400 for fields that cannot be read, 422 for those that are refused."""
    try:
        return model.model_validate(fields, context=SERVICE, by_alias=True, by_name=False)
    except ValidationError as error:
        raise error_from_pydantic(error) from None


def check_json_media(content_type: str, *, encoded: bool) -> None:
    """Raises 415 unless the body is JSON in UTF-8 and not compressed: nothing is ever inflated."""
    head = Message()
    head["content-type"] = content_type or "none"
    charset = head.get_content_charset()
    if encoded or head.get_content_type() != "application/json" or charset not in JSON_CHARSETS:
        raise InvalidRequestError("the body must be application/json in UTF-8", status=415)


def json_object(body: bytes, most_values: int) -> dict[str, Any]:
    """The JSON object of a body. Raises 400; 422 for U+0000, which one of the databases cannot hold."""
    try:
        value = strict_json.parse(body, most_values)
    except strict_json.JsonRefused as fault:
        if fault.fault == "nul":
            raise ValidationFailed(f"the body {fault.message}") from None
        raise InvalidRequestError(f"the body {fault.message}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return cast("dict[str, Any]", value)


def form_tags(text: object) -> Any:
    """The value of `tags`, which is JSON text in a form. Raises 422."""
    try:
        return strict_json.parse(str(text).encode("utf-8", "surrogatepass"))
    except strict_json.JsonRefused as fault:
        raise field_error("tags", fault.message) from None


def check_file_media(content_type: str | None, wanted: FileMedia) -> None:
    """Raises 422 unless the file part is of the wanted type, or of one that says nothing; lines may be plain text."""
    media = None if not content_type else content_type.partition(";")[0].strip().lower()
    if media not in FILE_TYPES[wanted]:
        raise field_error("file", f"must be of the media type {wanted.name}")
