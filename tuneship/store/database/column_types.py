"""The parts of tables: their metadata, kinds of columns, and a type for the rows of each table."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

if TYPE_CHECKING:
    R_co = TypeVar("R_co", covariant=True)

    class TypedTable(sa.Table, Generic[R_co]):
        """A table whose rows have the type `R_co`; only the type checker knows it apart from `sa.Table`."""

else:
    TypedTable = sa.Table

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


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


def text(name: str, **options: Any) -> "sa.Column[str]":
    """A text, never null."""
    return sa.Column(name, sa.Text, nullable=False, **options)


def moment(name: str, *, optional: bool = False) -> "sa.Column[datetime]":
    """A time in UTC."""
    return sa.Column(name, UtcDateTime, nullable=optional)


def whole(name: str, default: int = 0, **options: Any) -> "sa.Column[int]":
    """A whole number of 64 bits, never null."""
    return sa.Column(name, sa.BigInteger, nullable=False, default=default, **options)


def number(name: str) -> "sa.Column[float]":
    """A number with a fraction, never null."""
    return sa.Column(name, sa.Float, nullable=False)


def json_column(name: str, *, optional: bool = False) -> "sa.Column[Any]":
    """Anything that JSON holds."""
    return sa.Column(name, sa.JSON(none_as_null=True), nullable=optional)
