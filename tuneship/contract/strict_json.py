"""JSON as the service takes it: what parsers disagree about is refused (request bodies and dataset lines alike).

Refused: a byte order mark, invalid UTF-8, NaN, Infinity, 1e999, duplicate keys, lone surrogates, depth beyond 32.
U+0000 is reported apart (`nul`): it is valid JSON that one of the databases cannot hold.
"""

import json
import math
from typing import Any, Literal, NoReturn, cast

MAXIMUM_DEPTH = 32
Fault = Literal["invalid_utf8", "invalid_json", "duplicate_key", "nul"]


class JsonRefused(Exception):
    """Why a text is not taken; never quotes it."""

    def __init__(self, fault: Fault, message: str) -> None:
        """Keep the kind of fault and a message without content."""
        super().__init__(message)
        self.fault: Fault = fault
        self.message = message


def parse(data: bytes) -> Any:
    """Decode one JSON document. Raises `JsonRefused`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise JsonRefused("invalid_utf8", "is not valid UTF-8") from None
    try:
        value: Any = _DECODER.decode(text)
    except (ValueError, RecursionError):  # JsonRefused is neither
        raise JsonRefused("invalid_json", "is not valid JSON") from None
    _check(value, 1)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise JsonRefused("duplicate_key", "holds one key twice")
    return made


def _constant(_name: str) -> NoReturn:
    raise JsonRefused("invalid_json", "NaN and Infinity are not JSON")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise JsonRefused("invalid_json", "holds a number beyond the range of a double")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)


def _check(value: object, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict | list):
        if depth > MAXIMUM_DEPTH:
            raise JsonRefused("invalid_json", f"is nested deeper than {MAXIMUM_DEPTH}")
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            for key in fields:
                _check_text(key)
            members = list(fields.values())
        else:
            members = cast("list[object]", value)
        for one in members:
            _check(one, depth + 1)


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
