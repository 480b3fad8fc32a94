"""JSON from outside: parsed without trust in its shape, and the first place in which two values differ."""

import json
from itertools import zip_longest
from typing import Any, cast

# Longer texts are not repeated in a message.
SHOWN = 60


def json_of(content: bytes) -> Any:
    """The value. Raises ValueError for anything that is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None


def mapping_of(content: bytes) -> dict[str, Any]:
    """The JSON object. Raises ValueError for anything else."""
    value = json_of(content)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - of a file, not of an argument
    return cast("dict[str, Any]", value)


def lines_of(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects, one a line. Raises ValueError; the message has the number of the line."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            found.append(mapping_of(line))
        except ValueError:
            raise ValueError(f"line {number} cannot be read") from None
    return found


def pick(value: Any, *names: str) -> Any:
    """The field of a field; None where there is none."""
    for name in names:
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return value


def bounded(text: str, most: int = SHOWN) -> str:
    """A text from outside as one line that is not too long, and that no terminal takes for a command."""
    shown = text if len(text) <= most else f"{text[:most]}..."
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in shown)


def difference(ours: Any, theirs: Any) -> str | None:
    """The first place in which two JSON values differ, with both values; None for equal ones."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        one, other = cast("dict[str, Any]", ours), cast("dict[str, Any]", theirs)
        for name in dict.fromkeys([*one, *other]):
            found = difference(one.get(name), other.get(name))
            if found is not None:
                return f".{bounded(name)}{found}"
        return None
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = zip_longest(cast("list[Any]", ours), cast("list[Any]", theirs))
        for number, (one, other) in enumerate(pairs):
            found = difference(one, other)
            if found is not None:
                return f"{_entry(number, one, other)}{found}"
        return None
    same = _text(ours) == _text(theirs)
    return None if same else f": {_shown(ours)}, but {_shown(theirs)}"


def _text(value: Any) -> str:
    """A value as text, by which NaN equals itself and 1 equals 1.0, but not True; whole numbers keep all digits."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value)


def _entry(number: int, *entries: Any) -> str:
    """An entry of a list: by the look or the name that it has, else by its place."""
    look, name = (
        next((pick(one, key) for one in entries if pick(one, key)), None)
        for key in ("look", "name")
    )
    if isinstance(look, int):
        return f" look {look}"
    return f" {_shown(name)}" if isinstance(name, str) else f"[{number}]"


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a list or an object"
    text = value if isinstance(value, str) else json.dumps(value)
    return bounded(text) if len(text) <= SHOWN else f"a text of {len(text)} characters"
