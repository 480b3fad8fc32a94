"""JSON in answers: strict parsing, equality as JSON has it, and schemas whose check ends in time."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast
from urllib.parse import unquote

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend  # pyright: ignore[reportUnknownVariableType]
from referencing import Registry
from referencing.exceptions import Unresolvable

from tuneship.contract.lines import strict_json
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.evaluation.patterns import (
    MAXIMUM_ELEMENTS,
    SECONDS,
    PatternUnusable,
    compiled,
    elements_of,
)

MAXIMUM_SCHEMA_BYTES = 65_536
_NO_JSON = object()


def parsed(text: str) -> Any:
    """The value of a JSON text, or a value that equals no other."""
    try:
        return strict_json.parse(
            text.encode("utf-8", "surrogatepass"), strict_json.MAXIMUM_VALUES_OF_LINE
        )
    except strict_json.JsonRefused:
        return _NO_JSON


def is_json(value: object) -> bool:
    """Whether `parsed` found a value."""
    return value is not _NO_JSON


def canonical(value: Any) -> str:
    """A text that is the same for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        return {name: _with_whole_numbers(one) for name, one in members.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in cast("list[Any]", value)]
    return value


class SchemaUnusable(Exception):
    """A schema cannot be used. The message quotes nothing of it."""


_deadline: ContextVar[float] = ContextVar("deadline")

_Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


def _time_left() -> float:
    # Processor time: on a busy machine, an honest answer must not run out of it.
    left = _deadline.get() - time.thread_time()
    if left <= 0.0:
        raise TimeoutError
    return left


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value, timeout=_time_left()):
        yield ValidationError("does not match the pattern")


def _unique(_validator: Any, unique: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    # The library compares each pair.
    if unique and isinstance(value, list):
        members = cast("list[Any]", value)
        if len(set(map(canonical, members))) < len(members):
            yield ValidationError("has an element twice")


def _in_time(keyword: _Keyword) -> _Keyword:
    """The same keyword, refused when the time is over: references can multiply what a small schema asks for."""

    def check(validator: Any, rule: Any, value: Any, schema: Any) -> Any:
        _time_left()
        return keyword(validator, rule, value, schema)

    return check


# The first would search by `re`, which can take for ever; the others name parts of a schema in a second way.
_REFUSED = ("patternProperties", "$anchor", "$dynamicAnchor", "$dynamicRef")
_own: Any = {"pattern": _pattern, "uniqueItems": _unique}
_keywords: dict[str, Any] = {**Draft202012Validator.VALIDATORS, **_own}
_timed_validator: Any = cast("Any", extend)(
    Draft202012Validator, {name: _in_time(keyword) for name, keyword in _keywords.items()}
)


class TimedSchema:
    """A schema whose check of a value ends in `SECONDS`."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raise `SchemaUnusable` for a schema that is none, is too large, or refers to elsewhere."""
        try:
            size = len(json.dumps(schema))
        except (ValueError, RecursionError):  # too many digits or levels
            raise SchemaUnusable("is no JSON") from None
        if size > MAXIMUM_SCHEMA_BYTES:
            raise SchemaUnusable(f"must have at most {MAXIMUM_SCHEMA_BYTES} bytes")
        elements = 0
        for name, value in _members(schema):
            if name in _REFUSED:
                raise SchemaUnusable(f"must not have {name}")
            if name == "$ref" and isinstance(value, str) and not _has_part(schema, value):
                raise SchemaUnusable("must refer to parts of itself only, as #/$defs/name")
            if name == "pattern" and isinstance(value, str):
                elements += elements_of(value)
                _check_pattern(value)
        if elements > MAXIMUM_ELEMENTS:
            raise SchemaUnusable(f"has patterns of more than {MAXIMUM_ELEMENTS} elements together")
        try:
            Draft202012Validator.check_schema(schema)
        except (SchemaError, RecursionError):
            raise SchemaUnusable("is no JSON Schema of draft 2020-12") from None
        # A registry of nothing fetches nothing.
        registry: Any = Registry[Any]()
        self._validator = _timed_validator(schema, registry=registry)

    def fits(self, value: Any) -> bool:
        """Whether a value fits. Raises TimeoutError."""
        token = _deadline.set(time.thread_time() + SECONDS)
        try:
            return bool(self._validator.is_valid(value))
        except (RecursionError, ArithmeticError, Unresolvable):
            # A schema that refers to itself for ever, or a multiple of what no number can hold.
            return False
        finally:
            _deadline.reset(token)


def check_row(schema: TimedSchema, item: Mapping[str, Any]) -> None:
    """Check a row of one of OpenAI's evals by its `item_schema`. Raises `ExampleProblem`."""
    try:
        fits = schema.fits(item)
    except TimeoutError:
        raise ExampleProblem("invalid_value", "item", "takes too long to check") from None
    if not fits:
        raise ExampleProblem("invalid_value", "item", "does not fit item_schema")


def _check_pattern(pattern: str) -> None:
    try:
        compiled(pattern)
    except PatternUnusable as error:
        raise SchemaUnusable(f"has a pattern that {error}") from None


def _has_part(schema: object, reference: str) -> bool:
    start, _, path = reference.partition("#")
    if start or (path and not path.startswith("/")):
        return False
    part = schema
    for step in unquote(path).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = cast("Mapping[str, object]", part)[name]
        elif (
            isinstance(part, list)
            and name.isdecimal()
            and int(name) < len(cast("list[object]", part))
        ):
            part = cast("list[object]", part)[int(name)]
        else:
            return False
    return True


def _members(value: object) -> Iterator[tuple[str, object]]:
    """Yield the name and value of every member of every object within a value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            members = cast("Mapping[str, object]", one)
            yield from members.items()
            left.extend(members.values())
        elif isinstance(one, list):
            left.extend(cast("list[object]", one))
