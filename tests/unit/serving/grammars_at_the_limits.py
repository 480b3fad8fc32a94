"""Compile the longest chains of schemas that are accepted, on half of the usual stack of 8 MiB. Prints how many.

Then decide about the costliest schemas. They had been accepted when some of them took minutes, or without end.
"""

import resource
import threading
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tuneship.contract.schemas.answer_schemas import MAX_SUBSCHEMAS, read_schema
from tuneship.contract.schemas.schema_keywords import SchemaRefused
from tuneship.serving.sampling.grammar import grammar_of, is_usable

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


def several(count: int, part: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    properties = {name: part(number) for number, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names}


def multiples(*them: float, **more: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "multipleOf": one, **more} for one in them]}


LEAST = {f"min{what}": 1 for what in ("imum", "Length", "Items")}
COSTLY: list[dict[str, Any]] = [
    boxed(multiples(997, 991, 983, 977)),
    boxed(multiples(499, 491, 487, 479)),
    boxed(multiples(0.499, 4.91, 48.7, 479, minimum=0)),
    boxed({"anyOf": [multiples(499, 491), {"allOf": [multiples(487, 479)]}]}),
    several(160, lambda number: multiples(306, 410, maximum=12_345 * number)),
    several(480, lambda number: {"type": "integer", "multipleOf": 997, "minimum": -number}),
    several(400, lambda number: {**LEAST, "minItems": number}),
    {"anyOf": [{**LEAST, "minItems": number} for number in range(400)]},
    {"type": "object", "required": [f"n{number}" for number in range(7_000)]},
    {"enum": [{f"k{number}": [number, {"a": number}]} for number in range(1_000)]},
    {"enum": ["x" * 50 + str(number) for number in range(1_000)], "pattern": "^(x+x+)+y?[0-9]*$"},
    boxed(multiples(695, 802)),
    boxed({"type": "string", "pattern": "^(a{997})*$", "minLength": 999_999}),
]
# All of them take about two seconds together.
MOST_CPU_S = 30


def compile_all() -> None:
    compiled = sum(is_usable(grammar_of(longest(link))) for link in LINKS)
    # The kernel ends the process that takes longer.
    spent = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(spent.ru_utime + spent.ru_stime) + MOST_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    for schema in COSTLY:
        with suppress(SchemaRefused):
            is_usable(grammar_of(read_schema(schema).schema))
    print("chains compiled:", compiled)  # noqa: T201 - the test reads it


threading.stack_size(4 << 20)
thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
