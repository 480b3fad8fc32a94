"""Steps that all list operations share: a page of the caller's rows, and a page of a log after a cursor."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from tuneship.contract.common import LogCursor
from tuneship.service.context.context import Context
from tuneship.store.database import rows
from tuneship.store.database.listings import Listing
from tuneship.store.database.rows import Page

R = TypeVar("R")


def own_page(
    context: Context,
    listing: Listing[R],
    filters: Sequence[sa.ColumnElement[bool]],
    limit: int,
    offset: int,
    touch: Callable[[sa.Connection, Sequence[R]], None] | None = None,
) -> Page[R]:
    """One page of the caller's list, newest first; `touch` checks or records the shown rows."""
    with context.read() as connection:
        page = rows.listed(
            connection, listing, context.client_id, filters, limit=limit, offset=offset
        )
        # On the same snapshot: what is noted for the audit is what the caller sees.
        if touch is not None:
            touch(connection, page.rows)
    return page


def log_page(
    context: Context,
    log: str,
    after: str | None,
    read: Callable[[sa.Connection, int], Sequence[R]],
    number: Callable[[R], int],
) -> tuple[Sequence[R], LogCursor]:
    """The entries of a log behind the cursor `after`, in the order of `read`, and the cursor of the last one.

    `log` is the name that the cursors are bound to; `read` returns the entries after a position, and `number` the
    position of one. Raises `ValidationFailed` for a cursor of another log.
    """
    cursors = context.parts.cursors
    position = 0 if after is None else cursors.position(log, after)
    with context.read() as connection:
        entries = read(connection, position)
    # Without anything new the caller keeps its cursor, behind which the next entries will come.
    last = cursors.issue(log, number(entries[-1])) if entries else after
    return entries, LogCursor(after=last)
