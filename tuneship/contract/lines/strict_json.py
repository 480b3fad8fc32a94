"""Strict JSON for request bodies and dataset lines: refuses whatever parsers read differently.

Refused are a byte order mark, invalid UTF-8, NaN, Infinity, 1e999, duplicate keys, lone surrogates, depth beyond 32,
and more values than any honest text has: a megabyte of `[],[],` would cost a third of a second before it is refused for
its form. U+0000 has a fault of its own (`nul`): it is valid JSON that one of the databases cannot hold.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, cast

# Far more than any body of the API needs, and far less than what overflows a parser.
MAXIMUM_DEPTH = 32
# Values of a request body: objects, arrays and their members. A conversation of a thousand turns
# has 3,000; a megabyte of `[],[],` would cost other callers a third of a second.
MAXIMUM_VALUES = 10_000
# Values of a line of a dataset, which may have 8 MiB.
MAXIMUM_VALUES_OF_LINE = 100_000
NOT_JSON = "is not valid JSON"
NO_JSON_NUMBER = "NaN and Infinity are not JSON"
Fault = Literal["invalid_utf8", "invalid_json", "duplicate_key", "nul"]


class JsonRefused(Exception):
    """A text is refused. The message never quotes it."""

    def __init__(self, fault: Fault, message: str) -> None:
        """Keep the kind of fault and a message without content."""
        super().__init__(message)
        self.fault: Fault = fault
        self.message = message


def parse(data: bytes, most_values: int = MAXIMUM_VALUES) -> Any:
    """Decode one JSON document. Raises `JsonRefused`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise JsonRefused("invalid_utf8", "is not valid UTF-8") from None
    # Before decoding, which is what would cost the time and the memory.
    if len(data) > most_values and _values(data, most_values) > most_values:
        raise JsonRefused("invalid_json", f"holds more than {most_values} values")
    try:
        value: Any = _DECODER.decode(text)
    except (ValueError, RecursionError):  # JsonRefused is neither
        raise JsonRefused("invalid_json", NOT_JSON) from None
    # Only an escape can bring U+0000 or half a surrogate pair: the decoder refuses both as they are.
    if b"\\u" in data or data.count(b"[") + data.count(b"{") > MAXIMUM_DEPTH:
        _check(value)
    return value


def _values(data: bytes, most: int) -> int:
    """An upper bound of the number of values, counted in a few passes that run at the speed of C."""
    upper = _separators(data)
    if upper <= most:
        return upper
    # Separators within texts are none, so the texts are cut out; escaped backslashes go first, or a
    # quote behind one would look escaped.
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (quotes := bare.count(b'"')) > 4 * most:  # a value has two texts at most, a name and itself
        return quotes
    return _separators(b"".join(bare.split(b'"')[::2]))


def _separators(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise JsonRefused("duplicate_key", "holds one key twice")
    return made


def _constant(_name: str) -> NoReturn:
    raise JsonRefused("invalid_json", NO_JSON_NUMBER)


def _float(text: str) -> float:
    # The parser turns 1e999 into infinity, which no JSON text can hold when it is written again.
    number = float(text)
    if math.isinf(number):
        raise JsonRefused("invalid_json", "holds a number beyond the range of a double")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)


def _check(value: object) -> None:
    """Check every text, name and level, from left to right, so that the first fault is reported."""
    # An explicit stack: recursion would be at the mercy of the interpreter's limit.
    levels: list[Iterator[object]] = [iter([value])]
    while levels:
        member = next(levels[-1], _END)
        if member is _END:
            levels.pop()
        elif isinstance(member, str):
            _check_text(member)
        elif isinstance(member, dict | list):
            if len(levels) > MAXIMUM_DEPTH:
                raise JsonRefused("invalid_json", f"is nested deeper than {MAXIMUM_DEPTH}")
            # The names of an object are checked before its members.
            if isinstance(member, dict):
                fields = cast("dict[str, object]", member)
                for name in fields:
                    _check_text(name)
                levels.append(iter(fields.values()))
            else:
                levels.append(iter(cast("list[object]", member)))


_END = object()


def _check_text(text: str) -> None:
    if text.isascii():
        if "\x00" in text:
            raise JsonRefused("nul", "holds the character U+0000")
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise JsonRefused("invalid_json", "holds a lone surrogate") from None
    if "\x00" in text:
        raise JsonRefused("nul", "holds the character U+0000")
