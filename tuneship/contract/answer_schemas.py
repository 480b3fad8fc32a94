"""Schemas that an answer shall fit: which keywords of JSON Schema are followed, and how large a schema may be. Pure.

Whatever is not listed here is refused by its place, so that no keyword is silently without effect. A place names
keywords and numbers: `properties[2]` is the third property, whose name is the caller's own word. The limits keep the
compiler of the grammar (`tuneship/serving/grammar.py`) within its stack and within about a second.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast
from urllib.parse import unquote

MAX_SCHEMA_BYTES = 65_536
# Levels of schemas within schemas.
MAX_SCHEMA_DEPTH = 12
# The compiler recurses through references as through schemas: at about 1,500 it overflows a stack of 8 MiB.
MAX_SUBSCHEMAS = 500
# Of one object: each is a branch of the grammar, whose parser follows 2,000 at once.
MAX_OPTIONAL_PROPERTIES = 250
# Values of all `enum` lists together.
MAX_ENUM_VALUES = 1_000
MAX_VALUE_DEPTH = 8
# Of `minLength`, `maxItems` and the like.
MAX_COUNT = 1_000_000
MAX_PATTERN_CHARACTERS = 1_000
# Its digits, without the decimal point: the automaton of a multiple has as many states.
MAX_MULTIPLE = 1_000
MAX_MULTIPLES = 10_000
MAX_MULTIPLE_DECIMALS = 6

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
}
# Say nothing about which values fit.
ANNOTATIONS = {
    "$comment",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
}
DEFINITIONS = {"$defs", "definitions"}
# Keywords whose value is a schema (None), or has schemas by name or in a list.
SUBSCHEMAS: Mapping[str, type | None] = {
    "$defs": dict,
    "additionalProperties": None,
    "allOf": list,
    "anyOf": list,
    "definitions": dict,
    "items": None,
    "oneOf": list,
    "prefixItems": list,
    "properties": dict,
}
# Stand alone in their schema: with others beside them, the compiler would have to multiply schemas.
COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
# Keywords that exist and are not followed; only these names may be repeated to the caller.
UNSUPPORTED = {
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$id",
    "$recursiveAnchor",
    "$recursiveRef",
    "$vocabulary",
    "additionalItems",
    "contains",
    "contentSchema",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "id",
    "if",
    "maxContains",
    "maxProperties",
    "minContains",
    "minProperties",
    "not",
    "nullable",
    "patternProperties",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "x-guidance",
}


class SchemaRefused(Exception):
    """A schema cannot be followed. The message quotes nothing of it."""

    def __init__(self, place: str, message: str, code: str = "invalid_value") -> None:
        """`place` begins with a dot, or is empty for the whole schema."""
        super().__init__(message)
        self.place = place
        self.message = message
        self.code = code


@dataclass(frozen=True)
class AnswerSchema:
    """A schema without annotations, in the keywords that a grammar knows."""

    schema: dict[str, Any]
    parts: Mapping[str, Any]
    """It and the schemas within it, by place."""


def read_schema(schema: Mapping[str, Any]) -> AnswerSchema:
    """Read what a caller sent. Raises `SchemaRefused`."""
    reader = _Reader()
    read = reader.read(schema, "", (), 1)
    reader.resolve()
    reader.loosen()
    # Half a surrogate pair has no bytes; the service refuses it in any body.
    if len(json.dumps(read, ensure_ascii=False).encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise SchemaRefused("", f"must have at most {MAX_SCHEMA_BYTES} bytes")
    return AnswerSchema(read, reader.parts)


Pointer = tuple[str, ...]


@dataclass
class _Reader:
    """Reads a schema, and counts what is in it."""

    schemas: dict[Pointer, Any] = field(default_factory=dict[Pointer, Any])
    """All that references may name."""
    references: list[tuple[Pointer, str]] = field(default_factory=list[tuple[Pointer, str]])
    """Where each points, and its place."""
    parts: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same by place."""
    ends: dict[Pointer, Mapping[str, Any]] = field(default_factory=dict[Pointer, Mapping[str, Any]])
    """Where those followed so far lead to."""
    values: int = 0
    multiples: float = 0

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
            self._count(name, value, place)
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

    def _count(self, name: str, value: Any, place: str) -> None:
        """Count what is limited over the whole schema."""
        if name == "enum":
            self.values += len(value)
        elif name == "multipleOf":
            self.multiples += _digits(value)
        if self.values > MAX_ENUM_VALUES:
            raise SchemaRefused(place, f"brings the values of all lists above {MAX_ENUM_VALUES}")
        if self.multiples > MAX_MULTIPLES:
            raise SchemaRefused(place, f"brings the sum of all multiples above {MAX_MULTIPLES}")

    def resolve(self) -> None:
        """Raise `SchemaRefused` for a reference to what is no schema here, or to nothing but itself."""
        for pointer, place in self.references:
            if pointer not in self.schemas:
                raise SchemaRefused(place, "must name a schema within this one, as #/$defs/name")
        for pointer, place in self.references:
            if "$ref" in self._followed(pointer):
                raise SchemaRefused(place, "leads back to itself")

    def loosen(self) -> None:
        """Write `anyOf` for `oneOf` where at most one option can fit: a property that they require tells them apart.

        The compiler cannot see that through references.
        """
        for pointer, schema in self.schemas.items():
            if isinstance(schema, bool) or "oneOf" not in schema:
                continue
            count = len(schema["oneOf"])
            options = [self._followed((*pointer, "oneOf", str(one))) for one in range(count)]
            if _are_told_apart(options):
                schema["anyOf"] = schema.pop("oneOf")

    def _followed(self, pointer: Pointer) -> Mapping[str, Any]:
        """The schema that references lead to; a reference again where they lead to none."""
        path: list[Pointer] = []
        while pointer not in self.ends:
            self.ends[pointer] = {"$ref": ""}  # stays if it leads back to here
            path.append(pointer)
            schema = {} if isinstance(self.schemas[pointer], bool) else self.schemas[pointer]
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


def _are_told_apart(options: list[Mapping[str, Any]]) -> bool:
    """Whether a property that all options require has other texts in each."""
    if any(option.get("type") != "object" for option in options):
        return False
    for name in set[str].intersection(*(set(option.get("required", ())) for option in options)):
        texts = [_texts(option.get("properties", {}).get(name)) for option in options]
        if all(texts) and len(set[str]().union(*texts)) == sum(map(len, texts)):
            return True
    return False


def _texts(schema: Any) -> set[str]:
    """The texts that alone fit a schema; none where others may fit."""
    given = cast("dict[str, Any]", schema if isinstance(schema, dict) else {})
    values: list[Any] = given.get("enum", [given.get("const")])
    return set(values) if all(isinstance(one, str) for one in values) else set()


def _check_together(schema: Mapping[str, Any], place: str) -> None:
    """Raise `SchemaRefused` for keywords that cannot stand beside each other."""
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


def _type(value: object, place: str) -> None:
    types = cast("list[object]", value if isinstance(value, list) else [value])
    if not types or any(not isinstance(one, str) or one not in TYPES for one in types):
        raise SchemaRefused(place, f"must be of {', '.join(sorted(TYPES))}")


def _value(value: object, place: str) -> None:
    level = [value]
    for _ in range(MAX_VALUE_DEPTH):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, object]", one).values()
            elif isinstance(one, list):
                inner += cast("list[object]", one)
        level = inner
    if level:
        raise SchemaRefused(place, f"is deeper than {MAX_VALUE_DEPTH} levels")


def _values(value: object, place: str) -> None:
    if not isinstance(value, list) or not value:
        raise SchemaRefused(place, "must be a list with values")
    _value(cast("list[object]", value), place)


def _names(value: object, place: str) -> None:
    if not isinstance(value, list) or not all(
        isinstance(one, str) for one in cast("list[object]", value)
    ):
        raise SchemaRefused(place, "must be a list of names", "wrong_type")


def _text(value: object, place: str) -> None:
    if not isinstance(value, str):
        raise SchemaRefused(place, "must be a text", "wrong_type")


def _pattern(value: object, place: str) -> None:
    _text(value, place)
    if len(cast("str", value)) > MAX_PATTERN_CHARACTERS:
        raise SchemaRefused(place, f"must have at most {MAX_PATTERN_CHARACTERS} characters")


def _format(value: object, place: str) -> None:
    _text(value, place)
    if value not in FORMATS:
        text = f"is supported only as {', '.join(sorted(FORMATS))}"
        raise SchemaRefused(place, text, "unsupported_value")


def _count(value: object, place: str) -> None:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise SchemaRefused(place, f"must be a whole number from 0 to {MAX_COUNT}")


def _number(value: object, place: str) -> None:
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        raise SchemaRefused(place, "must be a number", "wrong_type")


def _multiple(value: object, place: str) -> None:
    _number(value, place)
    if not 0 < _digits(cast("float", value)) <= MAX_MULTIPLE:
        text = f"must be above 0, with digits up to {MAX_MULTIPLE} without the point"
        raise SchemaRefused(place, text)


def _digits(value: float) -> float:
    """A number without its decimal point; infinite for one with too many places behind it."""
    number = Decimal(str(value)).normalize()
    decimals = max(0, -cast("int", number.as_tuple().exponent))
    return math.inf if decimals > MAX_MULTIPLE_DECIMALS else float(number.scaleb(decimals))


CHECKS: Mapping[str, Callable[[object, str], None]] = {
    "$ref": _text,
    "const": _value,
    "enum": _values,
    "exclusiveMaximum": _number,
    "exclusiveMinimum": _number,
    "format": _format,
    "maxItems": _count,
    "maxLength": _count,
    "maximum": _number,
    "minItems": _count,
    "minLength": _count,
    "minimum": _number,
    "multipleOf": _multiple,
    "pattern": _pattern,
    "required": _names,
    "type": _type,
}
