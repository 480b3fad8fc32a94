"""Reads the schema that an answer must fit: the keywords that a grammar follows, within limits of its size. Pure.

Whatever is not known is refused by its place, so that no keyword is silently without effect. A place names keywords and
numbers: `properties[2]` is the third property, whose name is the caller's own word. The limits keep the compiler of the
grammar (`tuneship/serving/sampling/grammar.py`) within its stack and some tenths of a second.
Next: `schema_keywords.py`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, LiteralString, cast
from urllib.parse import unquote

from pydantic_core import PydanticCustomError

from tuneship.contract.schemas.schema_keywords import (
    ANNOTATIONS,
    CHECKS,
    SUBSCHEMAS,
    UNSUPPORTED,
    SchemaRefused,
    digits_of,
)

MAX_SCHEMA_BYTES = 65_536
# Levels of schemas within schemas.
MAX_SCHEMA_DEPTH = 12
# The compiler recurses through references as through schemas: at about 1,500 it overflows a stack of 8 MiB.
MAX_SUBSCHEMAS = 500
# Of one object: each is a branch of the grammar, whose parser follows 2,000 at once.
MAX_OPTIONAL_PROPERTIES = 250
# Values of all `enum` lists together.
MAX_ENUM_VALUES = 1_000
# The least common multiple of all `multipleOf`: those that stand in one `anyOf` have one automaton, whose states are
# the combinations of their remainders. No limit of the compiler ends its search in it.
MAX_COMMON_MULTIPLE = 100_000
DEFINITIONS = {"$defs", "definitions"}
# Stand alone in their schema: with others beside them, the compiler would have to multiply schemas.
COMBINING = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True)
class AnswerSchema:
    """A schema without annotations, in the keywords that a grammar knows."""

    schema: dict[str, Any]
    # It and the schemas within it, by place.
    parts: Mapping[str, Any]
    # Bytes of the schema as JSON.
    size: int


def read_schema(schema: Mapping[str, Any]) -> AnswerSchema:
    """Read what a caller sent. Raises `SchemaRefused`."""
    reader = _Reader()
    read = reader.read(schema, "", (), 1)
    reader.resolve()
    reader.loosen()
    try:
        # Half a surrogate pair has no bytes; the service refuses it in any body.
        written = json.dumps(read, ensure_ascii=False).encode(errors="replace")
    except ValueError:  # Python writes no integer of more than 4,300 digits
        raise SchemaRefused("", "holds a number with too many digits") from None
    if len(written) > MAX_SCHEMA_BYTES:
        raise SchemaRefused("", f"must have at most {MAX_SCHEMA_BYTES} bytes")
    return AnswerSchema(read, reader.parts, len(written))


def followed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a request; for an unsupported keyword raise pydantic's error with its place."""
    try:
        read_schema(schema)
    except SchemaRefused as error:
        code, text = cast("LiteralString", error.code), cast("LiteralString", error.message)
        raise PydanticCustomError(code, text, {"below": error.place}) from None
    return schema


Pointer = tuple[str, ...]


@dataclass
class _Reader:
    """Reads a schema, and counts its parts."""

    # The schema and all schemas within it, by the path that a reference to them has.
    schemas: dict[Pointer, Any] = field(default_factory=dict[Pointer, Any])
    # The path that each reference has, and its place.
    references: list[tuple[Pointer, str]] = field(default_factory=list[tuple[Pointer, str]])
    # The same schemas by place, without booleans.
    parts: dict[str, Any] = field(default_factory=dict[str, Any])
    # The schemas that paths lead to, for those followed so far.
    ends: dict[Pointer, Mapping[str, Any]] = field(default_factory=dict[Pointer, Mapping[str, Any]])
    # Values of all `enum` lists so far.
    values: int = 0
    # The least common multiple of all multiples so far, without their decimal points.
    multiple: int = 1

    def read(self, schema: object, place: str, pointer: Pointer, depth: int) -> Any:
        """The schema without annotations."""
        if len(self.schemas) == MAX_SUBSCHEMAS:
            raise SchemaRefused("", f"must have at most {MAX_SUBSCHEMAS} schemas within it")
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefused(place, f"is deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(schema, bool):
            self.schemas[pointer] = schema
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaRefused(place, "must be an object or a boolean", "wrong_type")
        read = self.schemas[pointer] = self.parts[place] = dict[str, Any]()
        for name, value in cast("Mapping[str, object]", schema).items():
            if name in ANNOTATIONS:
                continue
            if name in UNSUPPORTED:
                raise SchemaRefused(f"{place}.{name}", "is not supported", "unsupported_value")
            if name not in CHECKS and name not in SUBSCHEMAS:
                text = "holds a keyword that is not supported"
                raise SchemaRefused(place, text, "unsupported_value")
            read[name] = self._keyword(name, value, f"{place}.{name}", (*pointer, name), depth)
        _check_together(read, place)
        return read

    def _keyword(self, name: str, value: Any, place: str, pointer: Pointer, depth: int) -> Any:
        """The value of a keyword, with the schemas within it read."""
        if name in CHECKS:
            CHECKS[name](value, place)
            if name == "$ref":
                self.references.append((_pointer(value), place))
            elif name == "enum":
                self.values += len(value)
            elif name == "multipleOf":
                self.multiple = math.lcm(self.multiple, int(digits_of(value)))
            # Both are limited over the whole schema.
            if self.values > MAX_ENUM_VALUES:
                text = f"brings the values of all lists above {MAX_ENUM_VALUES}"
                raise SchemaRefused(place, text)
            if self.multiple > MAX_COMMON_MULTIPLE:
                text = (
                    f"brings the least common multiple of all of them above {MAX_COMMON_MULTIPLE}"
                )
                raise SchemaRefused(place, text)
            return value

        kind = SUBSCHEMAS[name]
        if kind is None:
            return self.read(value, place, pointer, depth + 1)
        if not isinstance(value, kind):
            must = "must be an object" if kind is dict else "must be a list"
            raise SchemaRefused(place, must, "wrong_type")
        keys = list(cast("dict[str, Any]", value)) if kind is dict else range(len(value))
        inner = [
            self.read(value[key], f"{place}[{number}]", (*pointer, str(key)), depth + 1)
            for number, key in enumerate(keys)
        ]
        return dict(zip(keys, inner, strict=True)) if kind is dict else inner

    def resolve(self) -> None:
        """Raise `SchemaRefused` for a reference that leads to no schema of this document, or only to itself."""
        for pointer, place in self.references:
            if pointer not in self.schemas:
                raise SchemaRefused(place, "must name a schema within this one, as #/$defs/name")
        for pointer, place in self.references:
            if "$ref" in self._followed(pointer):
                raise SchemaRefused(place, "leads back to itself")

    def loosen(self) -> None:
        """Rewrite `oneOf` as `anyOf` if at most one option can fit: a property that all require distinguishes them.

        The compiler cannot see that through references.
        """
        for pointer, schema in self.schemas.items():
            if isinstance(schema, bool) or "oneOf" not in schema:
                continue
            count = len(schema["oneOf"])
            options = [self._followed((*pointer, "oneOf", str(one))) for one in range(count)]
            if _are_distinguishable(options):
                schema["anyOf"] = schema.pop("oneOf")

    def _followed(self, pointer: Pointer) -> Mapping[str, Any]:
        """The schema that references lead to; a reference again where they lead to none."""
        path: list[Pointer] = []
        while pointer not in self.ends:
            self.ends[pointer] = {"$ref": ""}  # stays if it leads back to here
            path.append(pointer)
            found = self.schemas[pointer]
            schema: dict[str, Any] = {} if isinstance(found, bool) else found
            if "$ref" in schema:
                pointer = _pointer(schema["$ref"])
            elif "allOf" in schema:
                pointer = (*pointer, "allOf", "0")
            else:
                self.ends[pointer] = schema
        self.ends |= dict.fromkeys(path, self.ends[pointer])
        return self.ends[pointer]


def _pointer(reference: str) -> Pointer:
    """The path of a reference within its schema; one to elsewhere names nothing."""
    start, _, path = reference.partition("#")
    if start or (path and not path.startswith("/")):
        return ("", reference)
    parts = unquote(path).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def _are_distinguishable(options: list[Mapping[str, Any]]) -> bool:
    """Whether a property that all options require has other texts in each."""
    if any(option.get("type") != "object" for option in options):
        return False
    for name in set[str].intersection(*(set(option.get("required", ())) for option in options)):
        texts: list[set[str]] = []
        for option in options:
            found = option.get("properties", {}).get(name)
            schema = cast("dict[str, Any]", found if isinstance(found, dict) else {})
            values: list[Any] = schema.get("enum", [schema.get("const")])
            # No text stands for a schema that others may fit, too.
            texts.append(set(values) if all(isinstance(one, str) for one in values) else set())
        if all(texts) and len(set[str]().union(*texts)) == sum(map(len, texts)):
            return True
    return False


def _check_together(schema: Mapping[str, Any], place: str) -> None:
    """Raise `SchemaRefused` for keywords that exclude each other."""
    for name in COMBINING:
        if name in schema and schema.keys() - DEFINITIONS != {name}:
            raise SchemaRefused(f"{place}.{name}", "must stand alone in its schema")
        if name in schema and not schema[name]:
            raise SchemaRefused(f"{place}.{name}", "is empty")
    if len(schema.get("allOf", ())) > 1:
        text = "is supported with one member only"
        raise SchemaRefused(f"{place}.allOf", text, "unsupported_value")
    optional = schema.get("properties", {}).keys() - set(schema.get("required", ()))
    if len(optional) > MAX_OPTIONAL_PROPERTIES:
        text = f"has more than {MAX_OPTIONAL_PROPERTIES} properties that are not required"
        raise SchemaRefused(f"{place}.properties", text)
