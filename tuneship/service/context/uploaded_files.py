"""Stores the file of a request before its row, and removes it where the row does not follow."""

from functools import partial

import sqlalchemy as sa

from tuneship.service.context.context import Context
from tuneship.store.database import rows
from tuneship.store.database.database import Database
from tuneship.store.database.rows import Row
from tuneship.store.files.blobs import Blobs, BlobsAway, StagedFile


def keep_file(context: Context, table: sa.Table, row: Row, staged: StagedFile) -> None:
    """Store an uploaded file as the blob of a row that the request is going to insert into `table`."""
    database, blobs = context.parts.database, context.parts.blobs
    undo = partial(remove_unless_stored, database, blobs, table, row)
    context.after_rollback.append(undo)
    try:
        # Before the transaction, for which other writers would wait.
        blobs.keep(staged, row["blob"])
    except BlobsAway:
        # The removal would wait for the same store; the supervisor finds what the upload may have left.
        context.after_rollback.remove(undo)
        raise


def remove_unless_stored(database: Database, blobs: Blobs, table: sa.Table, row: Row) -> None:
    """Remove a file without a row. A commit that failed may have succeeded, so the row is looked for."""
    # A transaction for writing waits for the tenant's commit that the database has not ended yet.
    with database.write(row["client_id"]) as connection:
        is_stored = rows.count(connection, table, table.c.id == row["id"]) > 0
    if not is_stored:
        blobs.delete(str(row["blob"]).rpartition("/")[0])
