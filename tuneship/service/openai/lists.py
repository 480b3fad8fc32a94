"""Pages of OpenAI's lists, which begin behind the row of an id instead of at an offset."""

from collections.abc import Sequence
from typing import TypeVar, cast

import sqlalchemy as sa

from tuneship.contract.errors import InvalidRequestError
from tuneship.service.context.context import Context
from tuneship.store.database import rows
from tuneship.store.database.listings import Listing
from tuneship.store.database.rows import Row

R = TypeVar("R")


def page_behind(
    context: Context,
    listing: Listing[R],
    filters: Sequence[sa.ColumnElement[bool]],
    after: str | None,
    limit: int,
    *,
    is_rising: bool = False,
) -> tuple[list[R], bool]:
    """The rows behind the one with the id `after`, and whether there are more.

    Raises `InvalidRequestError` when that row is gone: the first page again would look like new entries.
    """
    with context.read() as connection:
        start: Row | None = None
        if after is not None:
            start = cast(
                "Row | None",
                rows.fetch(connection, listing.table, after, client_id=context.client_id),
            )
            if start is None:
                raise InvalidRequestError("after names an entry that does not exist", param="after")
        found = rows.behind(
            connection,
            listing,
            context.client_id,
            filters,
            after=start,
            limit=limit + 1,
            is_rising=is_rising,
        )
    return found[:limit], len(found) > limit
