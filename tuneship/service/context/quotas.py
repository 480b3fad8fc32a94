"""How many resources of a kind one client may have."""

import sqlalchemy as sa

from tuneship.contract.errors import QuotaExceeded
from tuneship.service.context.context import Context
from tuneship.store import queries as rows


def check_quota(
    context: Context, table: sa.Table, limit: int, what: str, *counted: sa.ColumnElement[bool]
) -> None:
    """Raises `QuotaExceeded` when the client has `limit` rows of those that are `counted`; `what` names them."""
    owned = rows.count(context.transaction, table, table.c.client_id == context.client_id, *counted)
    if owned >= limit:
        raise QuotaExceeded(f"this client has {limit} {what}, the most it may have")
