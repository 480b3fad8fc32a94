"""What every resource's queries share: insert, fetch by tenant, page, change. What is counted: `list_counters.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from tuneship.store import list_counters as listings
from tuneship.store.list_counters import Listing

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Page:
    """Rows of one page and the count of all that match."""

    rows: Sequence[Row]
    total: int
    limit: int
    offset: int

    @property
    def pagination(self) -> dict[str, int | None]:
        """The envelope of §8."""
        following = self.offset + self.limit
        return {
            "total": self.total,
            "limit": self.limit,
            "offset": self.offset,
            "next_offset": following if following < self.total else None,
        }


def insert(connection: sa.Connection, table: sa.Table, values: Row) -> Row:
    """Add a row and answer it whole, defaults included."""
    connection.execute(sa.insert(table).values(**values))
    found = fetch(connection, table, values["id"], client_id=values.get("client_id"))
    if found is None:
        raise RuntimeError(f"a row of {table.name} vanished inside its own transaction")
    listings.moved(connection, table, None, found)
    return found


def fetch(
    connection: sa.Connection, table: sa.Table, identifier: str, *, client_id: str | None
) -> Row | None:
    """One row of this tenant; None client: any tenant (the supervisor's view)."""
    query = sa.select(table).where(table.c.id == identifier)
    if client_id is not None:
        query = query.where(table.c.client_id == client_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else dict(row)


def change(
    connection: sa.Connection, table: sa.Table, identifier: str, now: datetime, **values: Any
) -> None:
    """Change columns of one row and its `updated_at`."""
    if listings.may_move(table, values):
        before = fetch(connection, table, identifier, client_id=None)
        if before is not None:
            listings.moved(connection, table, before, {**before, **values})
    connection.execute(
        sa.update(table).where(table.c.id == identifier).values(updated_at=now, **values)
    )


def remove(connection: sa.Connection, table: sa.Table, identifier: str) -> None:
    """Take one row away."""
    before = fetch(connection, table, identifier, client_id=None)
    if before is not None:
        connection.execute(sa.delete(table).where(table.c.id == identifier))
        listings.moved(connection, table, before, None)


def listed(
    connection: sa.Connection,
    listing: Listing,
    client_id: str,
    filters: Sequence[sa.ColumnElement[bool]],
    *,
    limit: int,
    offset: int,
) -> Page:
    """A page of a tenant's list. Without filters nothing in it takes longer the more rows there are."""
    is_counted = not filters and listing in listings.COUNTED
    known = None if not is_counted else listings.number(connection, listing, client_id)
    where = [*listing.of(client_id), *filters]
    return page(connection, listing.table, where, limit=limit, offset=offset, total=known)


def page(
    connection: sa.Connection,
    table: sa.Table,
    where: Sequence[sa.ColumnElement[bool]],
    *,
    limit: int,
    offset: int,
    total: int | None = None,
) -> Page:
    """Newest first, ties by id; counts what matches unless the `total` is known.

    The ids are found first, where an index holds all that this takes, and from the end that is nearer: a far page is
    skipped to without reading rows.
    """
    total = count(connection, table, *where) if total is None else total
    held = max(0, min(limit, total - offset))
    if held == 0:
        return Page([], total, limit, offset)
    behind = total - offset - held
    newest, oldest = (
        (table.c.created_at.desc(), table.c.id.desc()),
        (table.c.created_at, table.c.id),
    )
    order, skipped = (oldest, behind) if behind < offset else (newest, offset)
    ids = sa.select(table.c.id).where(*where).order_by(*order).limit(held).offset(skipped)
    chosen = ids.subquery("chosen")
    query = sa.select(table).join(chosen, table.c.id == chosen.c.id).order_by(*newest)
    found = [dict(row) for row in connection.execute(query).mappings()]
    return Page(found, total, limit, offset)


def count(connection: sa.Connection, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    """How many rows match."""
    return connection.execute(
        sa.select(sa.func.count()).select_from(table).where(*where)
    ).scalar_one()


def tags_match(table: sa.Table, tags: Mapping[str, str] | None) -> list[sa.ColumnElement[bool]]:
    """`tags[k]=v` filters, exact and all of them."""
    return [TagValue(table.c.tags, key) == value for key, value in (tags or {}).items()]


class TagValue(FunctionElement[str]):
    """The text under one key of a JSON object. SQLite's own JSON paths cannot name a key with a quote in it."""

    type = sa.Text()
    inherit_cache = True


@compiles(TagValue)
def _tag_value(element: Any, compiler: Any, **options: Any) -> str:
    column, key = (compiler.process(one, **options) for one in element.clauses)
    return f"({column} ->> {key})"


@compiles(TagValue, "sqlite")
def _tag_value_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    column, key = (compiler.process(one, **options) for one in element.clauses)
    return f"(SELECT value FROM json_each({column}) WHERE key = {key})"  # noqa: S608 - bound names
