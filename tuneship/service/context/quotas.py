"""Checks across the rows of one client: how many resources it may have, and whether a name is free.

Files count from their first byte: while they are staged in the memory of this process, then by their rows.
"""

from collections.abc import Generator
from contextlib import contextmanager

import sqlalchemy as sa

from tuneship.contract.errors import QuotaExceeded
from tuneship.host.disk_space import check_room
from tuneship.service.context.context import Context
from tuneship.settings import ServiceSettings
from tuneship.store.database import rows
from tuneship.store.files.blobs import StagedFile
from tuneship.store.records import dataset_records


def check_quota(
    context: Context, table: sa.Table, limit: int, what: str, *counted: sa.ColumnElement[bool]
) -> None:
    """Raises `QuotaExceeded` when the client has `limit` rows that match `counted`; `what` names them."""
    # In the transaction of the insert: a tenant has one writer at a time, so two requests cannot share the last place.
    owned = rows.count(context.transaction, table, table.c.client_id == context.client_id, *counted)
    if owned >= limit:
        raise QuotaExceeded(f"this client has {limit} {what}, the most it may have")


def room_left(settings: ServiceSettings, connection: sa.Connection, client_id: str) -> int:
    """The bytes that the client's files may still grow by, all kinds of them together."""
    used = dataset_records.bytes_of(connection, client_id)
    return settings.maximum_dataset_bytes - used


def check_bytes(context: Context, more: int) -> None:
    """Raises `QuotaExceeded` when `more` bytes would be too many for the client's files together."""
    if room_left(context.parts.settings, context.transaction, context.client_id) < more:
        raise _no_bytes_left(context)
    # The row counts from the commit on. Until then nothing does, lest another upload find the file counted twice.
    context.parts.staged_bytes.close(context.staged)


def _no_bytes_left(context: Context) -> QuotaExceeded:
    most = context.parts.settings.maximum_dataset_bytes
    return QuotaExceeded(f"the files of this client may hold {most} bytes in all")


@contextmanager
def staging(context: Context) -> Generator[StagedFile]:
    """Yield the staged file of a request. Its reservation ends with the block, or when the file is stored."""
    counting = context.parts.staged_bytes.counting(context.client_id, context.staged)
    with counting, context.parts.blobs.staged() as file:
        yield file


def own_room(context: Context) -> int:
    """The bytes by which the client's files may still grow, including those being staged now."""
    with context.read() as connection:
        return room_left(context.parts.settings, connection, context.client_id)


def reserve(context: Context, room: int, *, announced: int = 0, arrived: int = 0) -> None:
    """Reserve the bytes of the request's staged file. Raises `QuotaExceeded` if the client has less `room`."""
    count = context.staged
    announced = max(announced, count.announced)
    if not context.parts.staged_bytes.raise_to(count, room, announced=announced, arrived=arrived):
        raise _no_bytes_left(context)


def check_disk(context: Context) -> None:
    """Raises `DiskNearlyFull` if the disk lacks room for the rest of all open uploads."""
    check_room(context.parts.settings, context.parts.staged_bytes.coming(context.staged))


def is_name_taken(
    context: Context, column: "sa.Column[str]", name: str, is_live: sa.ColumnElement[bool]
) -> bool:
    """Whether a live row of the client has this name in `column`."""
    table = column.table
    owned = table.c.client_id == context.client_id
    return rows.count(context.transaction, table, owned, column == name, is_live) > 0
