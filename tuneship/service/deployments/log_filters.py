"""Parses the filter of a deployment's log, `level>=warning,message~took`, into conditions on its rows. Pure.

Conditions are joined by `,` or ` AND `. Keys: `level`, `component`, `request_id`, `message`; signs: `=`, `!=`, `>=` for
a level (and above), `~` for a message (contains, in upper or lower case).
"""

import re

import sqlalchemy as sa

from tuneship.contract.errors import ValidationFailed
from tuneship.service.answers.field_errors import field_error
from tuneship.store.database.tables import deployment_logs
from tuneship.store.records.deployment_logs import LEVELS

JOINT = re.compile(r",| AND ")
CONDITION = re.compile(r"\s*(level|component|request_id|message)\s*(!=|>=|=|~)\s*(.+?)\s*")
MAX_CONDITIONS = 16


def conditions_of(text: str | None) -> list[sa.ColumnElement[bool]]:
    """The conditions of a filter; empty without a filter. Raises `ValidationFailed`."""
    if text is None:
        return []
    parts = JOINT.split(text)
    if len(parts) > MAX_CONDITIONS:
        raise field_error("filter", f"must have at most {MAX_CONDITIONS} conditions")
    return [condition_of(part) for part in parts]


def condition_of(part: str) -> sa.ColumnElement[bool]:
    """One condition. Raises `ValidationFailed`."""
    match = CONDITION.fullmatch(part)
    if match is None:
        raise _unreadable()
    key, sign, value = match.groups()
    column = deployment_logs.c[key]
    if key == "level" and value not in LEVELS:
        raise field_error("filter", f"must compare level with one of {', '.join(LEVELS)}")
    if sign == "=":
        return column == value
    if sign == "!=":
        # A line without a request id is null in that column, and null differs from every value.
        return column.is_distinct_from(value)
    if sign == ">=" and key == "level":
        return column.in_(LEVELS[LEVELS.index(value) :])
    if sign == "~" and key == "message":
        return column.icontains(value, autoescape=True)
    raise _unreadable()


def _unreadable() -> ValidationFailed:
    return field_error(
        "filter",
        "must hold conditions like level=error, level>=warning, component!=replica or message~text,"
        " joined by a comma or AND",
    )
