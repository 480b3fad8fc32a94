"""Makes the JSON of long answers in pieces, so that neither the event loop nor Python's lock is held throughout.

pydantic writes a whole answer with the lock held: 300,000 log probabilities take a third of a second.
"""

import json
from collections.abc import Iterator
from typing import Any, cast, get_args

from pydantic import BaseModel, PlainSerializer, TypeAdapter, WrapSerializer
from pydantic.fields import FieldInfo
from pydantic_core import to_json

# Values beyond which writing them would hold up the event loop: they take some milliseconds.
LONG_VALUES = 10_000
CHARACTERS_A_VALUE = 100


def is_long(answer: object) -> bool:
    """Whether an answer has too many values, or too long ones, for the event loop."""
    left = LONG_VALUES
    waiting: list[Any] = [answer]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str | bytes):
            left -= len(one) // CHARACTERS_A_VALUE
        elif inner := _within(one):
            left -= len(inner)
            if left > 0:
                waiting += inner.values() if isinstance(inner, dict) else inner
        if left < 0:
            return True
    return False


def _within(value: Any) -> "dict[str, Any] | list[Any] | tuple[Any, ...] | None":
    if isinstance(value, BaseModel):
        return vars(value)
    return cast("Any", value) if isinstance(value, dict | list | tuple) else None


def dumped(kind: "TypeAdapter[Any]", answer: Any) -> bytes:
    """The JSON of an answer, with the long fields of an object after the short ones."""
    if isinstance(answer, BaseModel) and is_long(answer):
        return b"".join(_pieces(answer))
    return kind.dump_json(answer, by_alias=True)


def dumped_frame(data: BaseModel) -> str:
    """The JSON of a piece of a stream, with the names of its fields."""
    if is_long(data):
        return b"".join(_pieces(data, by_alias=False)).decode()
    return data.model_dump_json()


def _has_own_form(kind: Any) -> bool:
    """Whether values of a field or type are written by a function, which pydantic calls without holding up others."""
    parts = (kind.annotation, *kind.metadata) if isinstance(kind, FieldInfo) else get_args(kind)
    return isinstance(kind, PlainSerializer | WrapSerializer) or any(map(_has_own_form, parts))


def _pieces(value: Any, *, by_alias: bool = True) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        long = {
            name: one
            for name, field in fields.items()
            if is_long(one := getattr(value, name)) and not _has_own_form(field)
        }
        head = value.model_dump_json(by_alias=by_alias, exclude=set(long)).encode()
        if not long:
            yield head
            return
        yield head[:-1]
        comma = b"" if head == b"{}" else b","
        for name, one in long.items():
            shown = (fields[name].serialization_alias or fields[name].alias) if by_alias else None
            yield comma + json.dumps(shown or name).encode() + b":"
            yield from _pieces(one, by_alias=by_alias)
            comma = b","
        yield b"}"
    elif isinstance(value, list) and is_long(cast("object", value)):
        yield b"["
        for number, one in enumerate(cast("list[Any]", value)):
            yield b"," if number else b""
            yield from _pieces(one, by_alias=by_alias)
        yield b"]"
    elif isinstance(value, dict) and is_long(cast("object", value)):
        yield b"{"
        for number, (name, one) in enumerate(cast("dict[str, Any]", value).items()):
            yield (b"," if number else b"") + to_json(name) + b":"
            yield from _pieces(one, by_alias=by_alias)
        yield b"}"
    else:
        yield to_json(value, by_alias=by_alias, inf_nan_mode="null")
