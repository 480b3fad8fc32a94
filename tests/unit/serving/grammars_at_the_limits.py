"""Compile the longest chains of schemas that are accepted, on half of the usual stack of 8 MiB. Prints how many."""

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from tuneship.contract.answer_schemas import MAX_SUBSCHEMAS, read_schema
from tuneship.contract.schema_keywords import SchemaRefused
from tuneship.serving.grammar import grammar_of, is_usable

Link = Callable[[dict[str, Any]], dict[str, Any]]


def boxed(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": inner}, "required": ["x"]}


LINKS: list[Link] = [
    boxed,
    lambda inner: boxed(boxed(boxed(boxed(inner)))),
    lambda inner: {"type": "object", "properties": {"x": {"type": "array", "items": inner}}},
    lambda inner: {"type": "object", "additionalProperties": inner},
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": "array", "prefixItems": [inner], "minItems": 1, "items": False},
    lambda inner: {"anyOf": [inner, {"type": "null"}]},
    lambda inner: {"allOf": [inner]},
    lambda inner: inner,
]


def chain(length: int, link: Link) -> dict[str, Any]:
    """Definitions that lead from each to the next."""
    parts = {f"a{place}": link({"$ref": f"#/$defs/a{place + 1}"}) for place in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{length}": {"type": "integer"}}}


def is_accepted(length: int, link: Link) -> bool:
    try:
        read_schema(chain(length, link))
    except SchemaRefused:
        return False
    return True


def longest(link: Link) -> dict[str, Any]:
    length = bisect_left(range(MAX_SUBSCHEMAS), 1, key=lambda one: not is_accepted(one, link)) - 1
    return read_schema(chain(length, link)).schema


def compile_all() -> None:
    compiled = sum(is_usable(grammar_of(longest(link))) for link in LINKS)
    print("chains compiled:", compiled)  # noqa: T201 - the test reads it


threading.stack_size(4 << 20)
thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
