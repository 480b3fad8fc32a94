"""How answers are shown: tables on a terminal, tab-separated in a pipe, JSON with `--json`.

In a table every value is one line, and control characters are written out: an answer cannot move the cursor or forge
a row.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel

# A column of a table that is filled up; ids are never cut.
WIDEST_CELL = 48
# Of a long series, what a screen holds.
LAST_ROWS = 20
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Control characters that JSON may hold as they are.
RAW_IN_JSON = re.compile(r"[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# The first columns when not all fit.
FIRST = ("id", "event_id", "name", "status", "type")

Row = dict[str, Any]


def is_terminal() -> bool:
    """Whether people read the output."""
    return sys.stdout.isatty()


def write(text: str, end: str = "\n") -> None:
    """Write to standard output without buffering, because a reader of a pipe waits for it."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark for people, beside the output."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{readable(text)}\n")


def one_line(value: Any) -> str:
    """A value as one line of text; null is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
        return ", ".join(map(one_line, cast("list[Any]", value)))
    if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
        pairs = cast("dict[str, str]", value).items()
        return ", ".join(f"{one_line(key)}={one_line(text)}" for key, text in pairs)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return CONTROL.sub(lambda found: NAMED.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def readable(text: str) -> str:
    """A text of several lines for a terminal: its other control characters are written out."""
    return CONTROL.sub(
        lambda found: found[0] if found[0] in "\n\t" else f"\\u{ord(found[0]):04x}", text
    )


def as_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON that no terminal takes for a command."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return RAW_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def show_json(value: Any, *, is_stream: bool = False) -> None:
    """One document, or one line of a stream."""
    write(as_json(value, None if is_stream else 2))


def entries_field(reply: Any) -> tuple[str, type[BaseModel]] | None:
    """The field of a list reply that holds its entries, with their model; None for any other reply."""
    if not (isinstance(reply, type) and issubclass(reply, BaseModel)):
        return None
    lists: list[tuple[str, type[BaseModel]]] = []
    for name, field in reply.model_fields.items():
        if get_origin(field.annotation) is list:
            (element,) = get_args(field.annotation)
            if isinstance(element, type) and issubclass(element, BaseModel):
                lists.append((name, element))
    others = set(reply.model_fields) - {"pagination"}
    return lists[0] if len(lists) == 1 and others == {lists[0][0]} else None


def columns_of(model: type[BaseModel]) -> list[str]:
    """The names of an entry's fields on the wire."""
    return [field.alias or name for name, field in model.model_fields.items()]


def for_people(value: Any) -> str:
    """A value as one line of text; a number with a fraction is shortened."""
    return f"{value:.6g}" if isinstance(value, float) else one_line(value)


def show_rows(rows: Iterable[Row], columns: Sequence[str]) -> None:
    """A table; in a pipe a line of names, and then each row as soon as it comes."""
    if not is_terminal():
        write("\t".join(columns))
        for row in rows:
            write("\t".join(one_line(row.get(name)) for name in columns))
        return
    from rich.console import Console  # noqa: PLC0415 - starts slowly
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    cells = [[for_people(row.get(name)) for name in columns] for row in rows]
    if not cells:
        note("none")
        return
    console = Console(highlight=False)
    shown, left_out = _fitting(cells, columns, console.width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in shown:
        whole = columns[number] == "id" or columns[number].endswith("_id")
        table.add_column(
            columns[number], no_wrap=True, overflow="fold" if whole else "ellipsis",
            min_width=_width(cells, columns, number) if whole else None,
        )  # fmt: skip
    for texts in cells:
        table.add_row(*(Text(texts[number]) for number in shown))
    console.print(table)
    if left_out:
        note(f"not shown: {', '.join(left_out)} (--json has everything)")


def _width(cells: list[list[str]], columns: Sequence[str], number: int) -> int:
    longest = max(len(row[number]) for row in cells)
    is_id = columns[number] == "id" or columns[number].endswith("_id")
    return max(len(columns[number]), longest if is_id else min(longest, WIDEST_CELL))


def _fitting(
    cells: list[list[str]], columns: Sequence[str], width: int
) -> tuple[list[int], list[str]]:
    """The columns that fit side by side, in their order, and the names of the filled ones that do not fit."""
    filled = [number for number in range(len(columns)) if any(row[number] for row in cells)]

    def rank(number: int) -> tuple[int, int]:
        name = columns[number]
        first = FIRST.index(name) if name in FIRST else len(FIRST) - name.endswith("_name")
        return first, number

    shown: list[int] = []
    for number in sorted(filled, key=rank):
        needed = sum(_width(cells, columns, one) + 2 for one in (*shown, number)) - 2
        if needed <= width or not shown:
            shown.append(number)
    return sorted(shown), [columns[number] for number in filled if number not in shown]


def show_fields(value: Row) -> None:
    """One resource: a line for each field, nested ones as `a.b`; arrays of equal length become tables."""
    flat = dict(_flattened(value))
    arrays = _arrays(flat)
    left_out = {name for group in arrays.values() for name in group}
    if is_terminal():
        # Of a value that is a table in itself, people see only the summary.
        left_out |= {
            name
            for name, content in flat.items()
            if isinstance(content, list) and any(isinstance(one, list) for one in content)
        }
    lines = {
        name: for_people(content) if is_terminal() else one_line(content)
        for name, content in flat.items()
        if name not in left_out
    }
    lines = {name: text for name, text in lines.items() if text}
    width = max(map(len, lines), default=0)
    for name, text in lines.items():
        write(f"{name:<{width}}  {text}" if is_terminal() else f"{name}\t{text}")
    for parent, group in arrays.items():
        if lines or len(arrays) > 1:
            write(f"\n{parent}" if parent else "")
        names = [name.removeprefix(f"{parent}.") for name in group]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*group.values(), strict=True)]
        if is_terminal() and len(rows) > LAST_ROWS:
            note(f"the last {LAST_ROWS} of {len(rows)} (--json and a pipe have all)")
            rows = rows[-LAST_ROWS:]
        show_rows(rows, names)


def _flattened(value: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and inner:
            yield from _flattened(cast("Row", inner), f"{name}.")
        elif isinstance(inner, list) and any(_needs_a_line(one) for one in inner):
            for number, entry in enumerate(cast("list[Any]", inner)):
                yield f"{name}.{number}", entry
        else:
            yield name, inner


def _needs_a_line(value: Any) -> bool:
    """Whether an element of a list is an object or a sentence, and so no part of one line."""
    return isinstance(value, dict) or (isinstance(value, str) and value.endswith("."))


def _arrays(flat: Row) -> dict[str, dict[str, list[Any]]]:
    """Parallel arrays of equal length: the steps of a job, the buckets of a series."""
    groups: dict[str, dict[str, list[Any]]] = {}
    for name, value in flat.items():
        if isinstance(value, list) and not any(isinstance(one, list) for one in value):
            groups.setdefault(name.rpartition(".")[0], {})[name] = cast("list[Any]", value)
    return {
        parent: group
        for parent, group in groups.items()
        if len({len(one) for one in group.values()}) == 1
        and len(group) > 1
        and any(isinstance(one, int | float) for array in group.values() for one in array)
    }
