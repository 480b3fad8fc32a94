"""Keywords of JSON Schema: the supported ones with their checks, and those that are refused by name. Pure."""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import cast

MAX_VALUE_DEPTH = 8
# Of `minLength`, `maxItems` and the like.
MAX_COUNT = 1_000_000
MAX_PATTERN_CHARACTERS = 1_000
# Its digits, without the decimal point: the automaton of a multiple has as many states.
MAX_MULTIPLE = 1_000
MAX_MULTIPLE_DECIMALS = 6
LARGEST_NUMBER = 1e300

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


class SchemaRefused(Exception):
    """A schema cannot be followed. The message quotes nothing of it."""

    def __init__(self, place: str, message: str, code: str = "invalid_value") -> None:
        """`place` begins with a dot, or is empty for the whole schema."""
        super().__init__(message)
        self.place = place
        self.message = message
        self.code = code


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
    # The comparison also refuses what is no number, and integers that no float can hold.
    if type(value) not in (int, float) or not abs(cast("float", value)) <= LARGEST_NUMBER:
        raise SchemaRefused(place, "must be a number", "wrong_type")


def _multiple(value: object, place: str) -> None:
    _number(value, place)
    if not 0 < digits_of(cast("float", value)) <= MAX_MULTIPLE:
        text = f"must be above 0, with digits up to {MAX_MULTIPLE} without the point"
        raise SchemaRefused(place, text)


def digits_of(value: float) -> float:
    """A number without its decimal point; infinite if it has too many decimal places."""
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
