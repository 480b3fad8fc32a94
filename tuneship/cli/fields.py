"""The fields of declared models on a command line: which of them have an option, and how a text is read as their value.
Pure.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# Pieces of a path such as `deployments.0.id`; a longer one is a mistake.
DEEPEST_PATH = 16


class FieldKind(StrEnum):
    """How a field is given: by an option, or (`deep`) by `--set` and `--params` only."""

    TEXT = "text"
    FLAG = "flag"
    LIST = "list"
    PAIRS = "pairs"
    DEEP = "deep"


class BadField(Exception):
    """A field cannot be set so. The message names the field and the problem, not the value."""


def is_header(text: str) -> bool:
    """Whether a text can be the value of a header."""
    return bool(text) and text.isascii() and text.isprintable()


def members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows, without limits and without None."""
    if get_origin(hint) is Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(one for part in get_args(hint) for one in members(part))
    return () if hint is NoneType else (hint,)


def without_null(hint: Any) -> Any:
    """The one type of an optional field, with its limits; any other hint as it is."""
    parts = [one for one in get_args(hint) if one is not NoneType]
    is_union = get_origin(hint) in (Union, UnionType)
    return parts[0] if is_union and len(parts) == 1 else hint


def allows_null(hint: Any) -> bool:
    """Whether a field may be null."""
    if get_origin(hint) is Annotated:
        return allows_null(get_args(hint)[0])
    return hint is NoneType or (
        get_origin(hint) in (Union, UnionType) and any(map(allows_null, get_args(hint)))
    )


def is_scalar(hint: Any) -> bool:
    """Whether a value is one text, number, choice or time."""
    plain = (str, int, float, bool, datetime)
    return all(
        get_origin(one) is Literal
        or (isinstance(one, type) and (one in plain or issubclass(one, Enum)))
        for one in members(hint)
    )


def kind_of(hint: Any) -> FieldKind:
    """How a field of this type is given."""
    types = members(hint)
    if types == (bool,):
        return FieldKind.FLAG
    if is_scalar(hint):
        return FieldKind.TEXT
    arguments = get_args(types[0])
    if len(types) == 1 and get_origin(types[0]) is list and is_scalar(arguments[0]):
        return FieldKind.LIST
    if len(types) == 1 and get_origin(types[0]) is dict and is_scalar(arguments[1]):
        return FieldKind.PAIRS
    return FieldKind.DEEP


def element_of(hint: Any) -> Any:
    """The type of the elements of a list, or of the values of a mapping."""
    return get_args(members(hint)[0])[-1]


def choices_of(hint: Any) -> tuple[str, ...]:
    """The allowed words of a field, if the declaration lists them."""
    found: list[str] = []
    for one in members(hint):
        if get_origin(one) is Literal:
            found += map(str, get_args(one))
        elif isinstance(one, type) and issubclass(one, Enum):
            found += [str(member.value) for member in one]
    for extra in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        schema = extra.json_schema_extra if isinstance(extra, FieldInfo) else None
        if isinstance(schema, dict):
            found += map(str, cast("Sequence[Any]", schema.get("enum", ())))
    return tuple(found)


def type_words(hint: Any) -> str:
    """The types of a scalar field for people, as `number|auto`."""
    words = {str: "text", int: "integer", float: "number", datetime: "time"}
    found = [words.get(one, "|".join(map(str, get_args(one)))) for one in members(hint)]
    return "|".join(dict.fromkeys(found))


def value_of(hint: Any, text: str) -> Any:
    """The JSON value that a text means for a field of this type.

    Whether the value is allowed is left to the model, whose message names the field.
    """
    if str in members(hint):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def wire_names(model: type[BaseModel]) -> dict[str, tuple[FieldInfo, Any]]:
    """The fields of a model by their names on the wire, each with its type and the type's limits."""
    hints = get_type_hints(model, include_extras=True)
    return {
        field.alias or name: (field, hints.get(name, field.annotation))
        for name, field in model.model_fields.items()
    }


def hint_at(model: type[BaseModel], path: Sequence[str]) -> Any:
    """The type of the value at a path such as `hyperparameters.epochs`; None where the model has no such place."""
    hint: Any = model
    for part in path:
        for one in members(hint):
            if isinstance(one, type) and issubclass(one, BaseModel):
                hint = wire_names(one).get(part, (None, None))[1]
                break
            if get_origin(one) in (list, dict):
                hint = get_args(one)[-1]
                break
        else:
            return None
        if hint is None:
            return None
    return hint


def pair_in(text: str, name: str) -> tuple[str, str]:
    """The two sides of `key=value`. Raises `BadField`."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise BadField(f"{name}: write it as key=value")
    return key, value


def set_field(content: dict[str, Any], model: type[BaseModel], assignment: str) -> None:
    """Carry out one `a.b=value` on a body. Raises `BadField`."""
    place, text = pair_in(assignment, "--set")
    path = place.split(".")
    if len(path) > DEEPEST_PATH or not all(path):
        raise BadField("--set: write a path as field.field, with a number for an entry of a list")
    hint = hint_at(model, path)
    is_text = hint is not None and kind_of(hint) is FieldKind.TEXT
    value = value_of(hint if is_text else Any, text)
    if text == "null" and allows_null(hint):
        value = None
    inner: Any = content
    for depth, part in enumerate(path[:-1], start=1):
        inside = hint_at(model, path[:depth])
        is_list = any(get_origin(one) is list for one in members(inside)) if inside else False
        inner = _place(inner, part, [] if is_list else {}, is_value=False)
    _place(inner, path[-1], value, is_value=True)


def _place(inner: Any, part: str, fresh: Any, *, is_value: bool) -> Any:
    """Set the value at one part of a path, or return what lies there; a missing container is created."""
    if isinstance(inner, dict):
        fields = cast("dict[str, Any]", inner)
        if is_value or not isinstance(fields.get(part), dict | list):
            fields[part] = fresh
        return fields[part]
    entries = cast("list[Any]", inner)
    if not part.isdecimal() or int(part) > len(entries):
        raise BadField("--set: the entries of a list are numbered from 0, without a gap")
    if int(part) == len(entries):
        entries.append(fresh)
    elif is_value or not isinstance(entries[int(part)], dict | list):
        entries[int(part)] = fresh
    return entries[int(part)]


def described(field: FieldInfo, hint: Any) -> str:
    """The first paragraph of a field's description with its default, as the help shows it."""
    # The description of an optional field may stand in its type.
    inner = (one for one in get_args(without_null(hint))[1:] if isinstance(one, FieldInfo))
    texts = (one.description for one in (field, *inner) if one.description)
    text = next(texts, "").partition("\n\n")[0].removeprefix("Additive. ")
    if field.is_required():
        return f"{text} Needed.".strip()
    default = field.default
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        return f"{text} Default: {default}.".strip()
    return text
