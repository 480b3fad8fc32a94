"""Derives columns from a type of rows: a `TypedDict`, with arguments of `sa.Column` beside some of its types."""

from datetime import UTC, datetime
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time on both databases; SQLite alone would lose the time zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        """Convert a time to UTC for storage."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        """Give a stored time its zone, UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


_JSON = sa.JSON(none_as_null=True)
_STORED_AS: "dict[Any, Any]" = {
    str: sa.Text,
    Literal: sa.Text,
    int: sa.BigInteger,
    float: sa.Float,
    bool: sa.Boolean,
    bytes: sa.LargeBinary,
    datetime: UtcDateTime,
    dict: _JSON,
    list: _JSON,
}

# What a row type says of a column beside the type of its values: arguments of `sa.Column`, as in `Annotated[str, KEY]`.
KEY = {"primary_key": True}
SERIAL = {"primary_key": True, "type_": sa.BigInteger().with_variant(sa.Integer, "sqlite")}
SMALL = {"type_": sa.Integer, "default": None}
AS_JSON = {"type_": _JSON}
# A default that the database itself knows: for columns that a migration has added.
FALSE = {"server_default": sa.false()}
ZERO = {"server_default": "0"}


def one_of(states: type[StrEnum]) -> "dict[str, Any]":
    """Mark the column of a resource's state; `column.info["states"]` lists the possible ones."""
    return {"info": {"states": tuple(states)}}


def columns_of(row: type) -> "list[sa.Column[Any]]":
    """Make the columns that a type of rows declares, keys first, null where the type allows None."""
    hints = get_type_hints(row, include_extras=True)
    columns = [_column(name, declared) for name, declared in hints.items()]
    return sorted(columns, key=lambda column: not column.primary_key)


def _column(name: str, declared: Any) -> "sa.Column[Any]":
    arguments: dict[str, Any] = {}
    if get_origin(declared) is Annotated:
        declared, arguments = get_args(declared)
    is_optional = NoneType in get_args(declared)
    held = get_args(declared)[0] if is_optional else declared
    if held is int and not is_optional and "primary_key" not in arguments:
        # A whole number begins at 0 where nothing else is said.
        arguments = {"default": 0, **arguments}
    arguments = {
        "type_": _STORED_AS[get_origin(held) or held],
        "nullable": is_optional,
        **arguments,
    }
    return sa.Column(name, **arguments)
