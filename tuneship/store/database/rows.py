"""The queries that all resources share: insert, fetch by tenant, page, change. The lists: `listings.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from tuneship.contract.common import Pagination
from tuneship.store.database.listings import Listing
from tuneship.store.database.tables import TypedTable

# Any row, or the columns of one: for code that works on several tables. Else: the row types of `tables.py`.
Row = Mapping[str, Any]
R = TypeVar("R")


@dataclass(frozen=True)
class Page(Generic[R]):
    """The rows of one page and the number of all rows that match."""

    rows: Sequence[R]
    total: int
    limit: int
    offset: int

    @property
    def pagination(self) -> Pagination:
        """The `pagination` object of an answer (§8)."""
        following = self.offset + self.limit
        return Pagination(
            total=self.total,
            limit=self.limit,
            offset=self.offset,
            next_offset=following if following < self.total else None,
        )


def insert(connection: sa.Connection, table: "TypedTable[R]", values: Row) -> R:
    """Insert a row and return it with its defaults."""
    connection.execute(sa.insert(table).values(**values))
    stored = fetch(connection, table, values["id"], client_id=values.get("client_id"))
    if stored is None:
        raise RuntimeError(f"a row of {table.name} vanished inside its own transaction")
    return stored


def fetch(
    connection: sa.Connection, table: "TypedTable[R]", identifier: str, *, client_id: str | None
) -> R | None:
    """Fetch one row of a tenant; with `client_id=None` of any tenant, for the supervisor."""
    query = sa.select(table).where(table.c.id == identifier)
    if client_id is not None:
        query = query.where(table.c.client_id == client_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else cast("R", dict(row))


def fetch_all(connection: sa.Connection, query: "sa.Select[*tuple[Any, ...]]") -> list[Any]:
    """All rows of a query, as dictionaries; the caller annotates their type."""
    return [dict(row) for row in connection.execute(query).mappings()]


def matching(
    connection: sa.Connection, table: "TypedTable[R]", *where: sa.ColumnElement[bool]
) -> list[R]:
    """Every row of a table that meets all conditions."""
    return fetch_all(connection, sa.select(table).where(*where))


def change(
    connection: sa.Connection,
    table: "TypedTable[Any]",
    identifier: str,
    now: datetime,
    **values: Any,
) -> None:
    """Change columns of one row, and its `updated_at`."""
    connection.execute(
        sa.update(table).where(table.c.id == identifier).values(updated_at=now, **values)
    )


def remove(connection: sa.Connection, table: "TypedTable[Any]", identifier: str) -> None:
    """Delete one row."""
    connection.execute(sa.delete(table).where(table.c.id == identifier))


def listed(
    connection: sa.Connection,
    listing: Listing[R],
    client_id: str,
    filters: Sequence[sa.ColumnElement[bool]],
    *,
    limit: int,
    offset: int,
) -> Page[R]:
    """One page of a tenant's list."""
    where = [*listing.filters(client_id), *filters]
    return page(connection, listing.table, where, limit=limit, offset=offset)


def behind(  # noqa: PLR0913 - what a list by ids is asked for
    connection: sa.Connection,
    listing: Listing[R],
    client_id: str,
    filters: Sequence[sa.ColumnElement[bool]],
    *,
    after: Row | None,
    limit: int,
    is_rising: bool = False,
) -> list[R]:
    """At most `limit` rows of a tenant's list after the row `after`, newest first unless `is_rising`."""
    table = listing.table
    place = sa.tuple_(table.c.created_at, table.c.id)
    where = [*listing.filters(client_id), *filters]
    if after is not None:
        start = sa.tuple_(
            sa.literal(after["created_at"], table.c.created_at.type), sa.literal(after["id"])
        )
        where.append(place > start if is_rising else place < start)
    columns = (table.c.created_at, table.c.id)
    order = columns if is_rising else tuple(column.desc() for column in columns)
    return fetch_all(connection, sa.select(table).where(*where).order_by(*order).limit(limit))


def page(
    connection: sa.Connection,
    table: "TypedTable[R]",
    where: Sequence[sa.ColumnElement[bool]],
    *,
    limit: int,
    offset: int,
) -> Page[R]:
    """One page, newest first, ties by id, and the number of all matching rows."""
    total = count(connection, table, *where)
    length = max(0, min(limit, total - offset))
    if length == 0:
        return Page([], total, limit, offset)

    # A covering index gives the ids, read from the nearer end: even a far page skips no whole rows.
    rest = total - offset - length
    newest = (table.c.created_at.desc(), table.c.id.desc())
    oldest = (table.c.created_at, table.c.id)
    order, skipped = (oldest, rest) if rest < offset else (newest, offset)
    ids = sa.select(table.c.id).where(*where).order_by(*order).limit(length).offset(skipped)
    chosen = ids.subquery("chosen")
    query = sa.select(table).join(chosen, table.c.id == chosen.c.id).order_by(*newest)
    return Page(fetch_all(connection, query), total, limit, offset)


def count(connection: sa.Connection, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    """Number of rows that match."""
    return connection.execute(
        sa.select(sa.func.count()).select_from(table).where(*where)
    ).scalar_one()


def filters_of(
    table: sa.Table, tags: Mapping[str, str] | None = None, **columns: str | None
) -> list[sa.ColumnElement[bool]]:
    """Conditions for a list's filters by tag and by column: each must match exactly, and None filters nothing."""
    return [
        *(TagValue(table.c.tags, key) == value for key, value in (tags or {}).items()),
        *(table.c[name] == value for name, value in columns.items() if value is not None),
    ]


class TagValue(FunctionElement[str]):
    """The text at one key of a JSON object. SQLite's own JSON paths cannot express a key that contains a quote."""

    type = sa.Text()
    inherit_cache = True


@compiles(TagValue)
def _tag_value(element: Any, compiler: Any, **options: Any) -> str:
    column, key = (compiler.process(clause, **options) for clause in element.clauses)
    return f"({column} ->> {key})"


@compiles(TagValue, "sqlite")
def _tag_value_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    column, key = (compiler.process(clause, **options) for clause in element.clauses)
    return f"(SELECT value FROM json_each({column}) WHERE key = {key})"  # noqa: S608 - bound names
