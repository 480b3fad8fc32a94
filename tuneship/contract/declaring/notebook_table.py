"""Replies as small HTML tables, which notebooks show. Every text is escaped and cut."""

from collections.abc import Iterable
from html import escape
from typing import Any, cast

LONGEST_TEXT = 200
MOST_ROWS = 20


def html_table(name: str, fields: Iterable[tuple[str | None, Any]]) -> str:
    """A table of a reply's fields as its `repr` has them: a row for each field with a value.

    A list of replies, as a page has, is a table with a row for each of them.
    """
    rows = "".join(
        f"<tr><th>{escape(field or '')}</th><td>{_cell(value)}</td></tr>"
        for field, value in fields
        if value is not None
    )
    return f"<table><caption>{escape(name)}</caption>{rows}</table>"


def _cell(value: object) -> str:
    entries = cast("list[Any]", value if isinstance(value, list) else [])
    if not entries or not all(hasattr(entry, "__repr_args__") for entry in entries):
        return _text(cast("object", value))
    shown = [dict(entry.__repr_args__()) for entry in entries[:MOST_ROWS]]
    head = "".join(f"<th>{escape(field)}</th>" for field in shown[0])
    rows = "".join(
        f"<tr>{''.join(f'<td>{_text(entry.get(field))}</td>' for field in shown[0])}</tr>"
        for entry in shown
    )
    more = len(entries) - len(shown)
    rest = f"<p>and {more} more</p>" if more else ""
    return f"<table><tr>{head}</tr>{rows}</table>{rest}"


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return escape(text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…")
