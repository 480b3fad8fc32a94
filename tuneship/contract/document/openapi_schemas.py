"""How the contract's models become JSON Schema components: requests as they are read, replies as they are written.

Pydantic makes the schemas; this file corrects them where the wire knows more: a reply always holds its fields, a create
takes null as not sent, a key that is left out is never null, keys of an object have limits. Next: `openapi.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import core_schema

from tuneship.contract.common import CreateRequest
from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import BY_CODE
from tuneship.contract.generation import (
    BrokenOff,
    GeneratedText,
    Generation,
    generate,
    generate_by_endpoint,
)
from tuneship.contract.jobs import JobLogEntry, JobStep, get_job_logs

Json = dict[str, Any]
TEMPLATE = "#/components/schemas/{model}"
GENERATED = TypeAdapter[Any](GeneratedText | Generation | BrokenOff)
# Models of the lines of a stream, by operation.
FRAMES = {
    get_job_logs.name: TypeAdapter[Any](JobLogEntry | JobStep | BrokenOff),
    generate.name: GENERATED,
    generate_by_endpoint.name: GENERATED,
}

SHARED_SCHEMAS: Json = {
    "Fields": {
        "type": "object",
        "description": "Fields by their names; more may come.",
        "additionalProperties": True,
    },
    "StreamEvent": {
        "type": "object",
        "description": "One server-sent event; its `data` is a JSON object, at the end of a log `[DONE]`.",
        "required": ["event", "data"],
        "properties": {
            "event": {
                "type": "string",
                "description": "`log`, `metrics` or `token`, at the end `done` or `error`.",
            },
            "data": {"type": "string"},
            "id": {"type": "string", "description": "For `Last-Event-ID` or `after`."},
        },
    },
    "Texts": {"type": "object", "additionalProperties": {"type": "string"}},
    "Error": {
        "type": "object",
        "description": "The body of every error.",
        "required": ["error"],
        "properties": {"error": {"$ref": TEMPLATE.format(model="ErrorBody")}},
    },
    "ErrorBody": {
        "type": "object",
        "required": ["code", "message", "type", "param", "request_id", "details"],
        "properties": {
            "code": {"$ref": TEMPLATE.format(model="ErrorCode")},
            "message": {
                "type": "string",
                "description": "Names fields, limits and counts; never what was sent.",
            },
            "type": {"$ref": TEMPLATE.format(model="ErrorCode")},
            "param": {
                "type": ["string", "null"],
                "description": "Dotted path of the first refused field.",
            },
            "request_id": {"type": "string", "description": "The answer's `X-Request-ID`."},
            "details": {"type": "array", "items": {"$ref": TEMPLATE.format(model="ErrorDetail")}},
        },
    },
    "ErrorCode": {"type": "string", "enum": list(BY_CODE)},
    "ErrorDetail": {
        "type": "object",
        "description": "One refused place: a field of the request, or a line of a file.",
        "required": ["field", "code", "message"],
        "properties": {
            "field": {"type": ["string", "null"]},
            "code": {"type": "string"},
            "message": {"type": "string"},
            "line": {"type": "integer", "description": "Line of the file, from 1."},
        },
    },
}


# As pydantic writes them, without a description.
_UNNAMED = {
    name: {key: one for key, one in SHARED_SCHEMAS[name].items() if key != "description"}
    for name in ("Fields", "Texts")
}


class _Wire(GenerateJsonSchema):
    """Pydantic's generator, corrected to the form on the wire."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's signature
        return False  # a title that repeats the name says nothing

    def field_is_required(self, field: Any, total: bool) -> bool:
        # A reply holds all its fields but those that it leaves out without a value.
        if self.mode == "serialization":
            return "serialization_exclude_if" not in field
        return super().field_is_required(field, total)

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        made = super().model_schema(schema)
        properties: dict[str, Json] = made.get("properties", {})
        required = made.get("required", ())
        is_create = issubclass(schema["cls"], CreateRequest)
        for name, schema_of_field in properties.items():
            # Null in a create counts as not sent, and a reply leaves such a field out: neither wire form
            # has a null there.
            is_left_out = self.mode == "serialization" and name not in required
            if is_left_out or (is_create and name not in required):
                properties[name] = not_null(schema_of_field)
            # A default of null says what "optional" says already; in a reply a default has no meaning.
            if schema_of_field.get("default", ...) is None or self.mode == "serialization":
                properties[name].pop("default", None)
            properties[name].pop("title", None)
        made.pop("title", None)
        return made

    def dict_schema(self, schema: core_schema.DictSchema) -> Json:
        made = super().dict_schema(schema)
        patterned: dict[str, Json] | None = made.pop("patternProperties", None)
        # Pydantic refuses names that match no pattern; in JSON Schema, `patternProperties` would allow them.
        if patterned is not None:
            pattern, value = next(iter(patterned.items()))
            made["propertyNames"] = {**made.get("propertyNames", {}), "pattern": pattern}
            made["additionalProperties"] = value
        return made


def not_null(schema: Json) -> Json:
    """The schema without its null branch."""
    branches: list[Json] | None = schema.get("anyOf")
    if branches is None or {"type": "null"} not in branches:
        return schema
    kept = [branch for branch in branches if branch != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**kept[0], **rest} if len(kept) == 1 else {"anyOf": kept, **rest}


def text_of(docstring: str | None) -> str:
    """A docstring's paragraphs without its line breaks."""
    return "\n\n".join(" ".join(one.split()) for one in (docstring or "").split("\n\n"))


def summary_of(text: str) -> str:
    """The first sentence of a description, or its first part."""
    return re.split(r"[.;:]\s|\.$", text)[0]


def without_references(text: str) -> str:
    """The text without references to sections of the API description, which readers of the document do not have."""
    return re.sub(r"\s*\(§[^)]*\)", "", text)


class Schemas:
    """Schema components of some operations, and the schemas of each operation's parts."""

    def __init__(
        self,
        operations: Sequence[Operation[..., Any]],
        frames: Mapping[str, TypeAdapter[Any]] = FRAMES,
    ) -> None:
        """Generate all at once, so that a model that is used twice becomes one component.

        `frames`: the models of the lines of streams, by operation.
        """
        wanted: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = []
        for operation in operations:
            if not operation.is_download:
                wanted.append((_key(operation, "reply"), "serialization", operation.reply_type))
            for name in operation.path_parameters:
                adapter = TypeAdapter[Any](operation.hints[name])
                wanted.append((_key(operation, name), "validation", adapter))
            query = TypeAdapter[Any](operation.query_model)
            wanted.append((_key(operation, "query"), "validation", query))
            if operation.may_stream:
                wanted.append((_key(operation, "frame"), "serialization", frames[operation.name]))
            if operation.body_parameter is not None:
                body = TypeAdapter[Any](operation.body_parameter[1])
                wanted.append((_key(operation, "body"), "validation", body))
        made, shared = TypeAdapter.json_schemas(
            wanted, ref_template=TEMPLATE, schema_generator=_Wire
        )
        self._parts: dict[str, Json] = {key: _plain(part) for (key, _), part in made.items()}
        self.components: dict[str, Json] = _plain(shared["$defs"])
        for operation in operations:
            # The model of a query is made up from the signature: it is no component of the API.
            query = self._parts[_key(operation, "query")]
            if "$ref" in query:
                self._parts[_key(operation, "query")] = self.components.pop(_name(query))
            # A file is no field of the model: it is read as a stream, and never held as a value.
            if operation.is_form:
                _add_file(self.components[_name(self._parts[_key(operation, "body")])])
        self.components = dict(sorted((self.components | SHARED_SCHEMAS).items()))

    def path_of(self, operation: Operation[..., Any], parameter: str) -> Json:
        """The schema of an id in the path."""
        return self._parts[_key(operation, parameter)]

    def query_of(self, operation: Operation[..., Any]) -> dict[str, Json]:
        """Schemas of the query parameters by name. None is null: a caller leaves a parameter out instead."""
        parameters = self._parts[_key(operation, "query")].get("properties", {})
        return {name: not_null(schema) for name, schema in parameters.items()}

    def body_of(self, operation: Operation[..., Any]) -> tuple[Json, bool]:
        """A reference to the body's schema, and whether a body must be sent."""
        place = self._parts[_key(operation, "body")]
        schema = self.components[_name(place)]
        # `if` stands for "one of two fields": then a body is needed although no single field is.
        return place, bool(schema.get("required") or "if" in schema)

    def frames_of(self, operation: Operation[..., Any]) -> dict[str, Json]:
        """The schema of one event or one line, by media type: OpenAPI 3.1 cannot describe a sequence of them."""
        return {
            "text/event-stream": {"$ref": TEMPLATE.format(model="StreamEvent")},
            "application/x-ndjson": self._parts[_key(operation, "frame")],
        }

    def reply_of(self, operation: Operation[..., Any]) -> Json:
        """The reply's schema, usually a reference."""
        return self._parts[_key(operation, "reply")]


def _key(operation: Operation[..., Any], part: str) -> str:
    return f"{operation.name} {part}"


def _name(reference: Json) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _add_file(schema: Json) -> None:
    schema["properties"]["file"] = {
        "type": "string",
        "format": "binary",
        "description": "JSON Lines, UTF-8: one example a line.",
    }
    schema["required"] = [*schema.get("required", ()), "file"]


def _plain(value: Any) -> Any:
    """The value with texts for readers of the document, and with one name for objects of any fields, at every depth.

    Code generators make a class of each object without a name, and its name may be taken already.
    """
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        name = next((name for name, form in _UNNAMED.items() if members == form), None)
        if name is not None:
            return {"$ref": TEMPLATE.format(model=name)}
        return {
            key: without_references(one)
            if key == "description" and isinstance(one, str)
            else _plain(one)
            for key, one in members.items()
        }
    return [_plain(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value
