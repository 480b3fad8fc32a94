"""Templates: text with names in double braces, such as `{{item.reference}}`, without expressions of any kind. Pure."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Part = tuple[str, str | None]


class TextTooLong(Exception):
    """A template makes a longer text than it may: it can name a long value a thousand times."""


def template_parts(template: str, names: re.Pattern[str], known: str) -> list[Part]:
    """Each text of a template with the name behind it, None behind the last. Raises ValueError for other names."""
    start, *rest = template.split("{{")
    parts: list[Part] = []
    for piece in rest:
        name, closing, text = piece.partition("}}")
        name = name.strip()
        if not closing:
            raise ValueError("opens {{ without closing it")
        if not names.fullmatch(name):
            raise ValueError(f"holds an unknown name; known are {known}")
        parts.append((start, name))
        start = text
    return [*parts, (start, None)]


def filled(parts: Sequence[Part], value_of: Callable[[str], Any], most: int) -> str:
    """The text; values that are no text are written as JSON. Raises `TextTooLong` before it has so many characters."""
    names = dict.fromkeys(name for _, name in parts if name)
    values = {name: _written(value_of(name)) for name in names}
    pieces = [piece for text, name in parts for piece in (text, values[name] if name else "")]
    if sum(map(len, pieces)) > most:
        raise TextTooLong
    return "".join(pieces)


def _written(value: Any) -> str:
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    )
