"""Escapes text of users for Markdown, so that it makes no tag, no link and no row of its own.

Markdown passes `<script>` and `[..](javascript:..)` on as they stand, to the browser of whoever reads a report.
"""

import re
from collections.abc import Sequence

_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
# In this order: the ampersand of an entity must not be escaped once more.
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# An underscore inside a word starts no emphasis, and ids are full of them.
_SPECIAL = re.compile(r"[\\`*~\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")

# Signs that begin a heading, an item, a rule or an underline where they come first.
_OPENING = re.compile(r"(\d{0,9})([#+=.)-])")


def plain(text: object) -> str:
    """Escape text into one line that every renderer shows letter by letter, also in a table."""
    line = _BREAKS.sub(" ", str(text))
    for sign, entity in _ENTITIES.items():
        line = line.replace(sign, entity)
    return _SPECIAL.sub(r"\\\g<0>", line)


def sentence(text: object) -> str:
    """Escape text that begins a paragraph or an item, so that it begins no block of another kind."""
    line = plain(text).lstrip(" ")
    return _OPENING.sub(r"\1\\\2", line, count=1) if _OPENING.match(line) else line


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[object]],
    stressed: frozenset[int] = frozenset(),
) -> str:
    """Write a table whose cells may hold names that users chose: none ends its cell."""
    lines = [[plain(title) for title in titles], ["---"] * len(titles)]
    for index, row in enumerate(rows):
        first, *others = map(plain, row)
        lines.append([f"**{first}**" if index in stressed else first, *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Show a count as it is, a measured value in four digits, and a missing value as a dash."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def code(text: object) -> str:
    """Show an id in a fixed-width font; a code span has no escapes, so a backtick becomes an apostrophe."""
    return f"`{_BREAKS.sub(' ', str(text)).replace('`', chr(39))}`"
