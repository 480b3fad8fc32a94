"""Checks across the rows of one client: how many resources it may have, and whether a name is free."""

import sqlalchemy as sa

from tuneship.contract.errors import QuotaExceeded
from tuneship.service.context.context import Context, Parts
from tuneship.store import dataset_records
from tuneship.store import queries as rows


def check_quota(
    context: Context, table: sa.Table, limit: int, what: str, *counted: sa.ColumnElement[bool]
) -> None:
    """Raises `QuotaExceeded` when the client has `limit` rows that match `counted`; `what` names them."""
    # In the transaction of the insert: a tenant has one writer at a time, so two requests cannot share the last place.
    owned = rows.count(context.transaction, table, table.c.client_id == context.client_id, *counted)
    if owned >= limit:
        raise QuotaExceeded(f"this client has {limit} {what}, the most it may have")


def room_left(parts: Parts, connection: sa.Connection, client_id: str) -> int:
    """The bytes that the client's files may still grow by, all kinds of them together."""
    used = dataset_records.bytes_of(connection, client_id)
    return parts.settings.maximum_dataset_bytes - used


def check_bytes(context: Context, more: int) -> None:
    """Raises `QuotaExceeded` when `more` bytes would be too many for the client's files together."""
    if room_left(context.parts, context.transaction, context.client_id) < more:
        most = context.parts.settings.maximum_dataset_bytes
        raise QuotaExceeded(f"the files of this client may hold {most} bytes in all")


def is_name_taken(
    context: Context, column: "sa.Column[str]", name: str, is_live: sa.ColumnElement[bool]
) -> bool:
    """Whether a live row of the client has this name in `column`."""
    table = column.table
    owned = table.c.client_id == context.client_id
    return rows.count(context.transaction, table, owned, column == name, is_live) > 0
