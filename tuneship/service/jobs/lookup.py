"""Finds the caller's jobs."""

import sqlalchemy as sa

from tuneship.contract.errors import ResourceNotFound
from tuneship.service.context.context import Context
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import JobRow


def own_job(context: Context, job_id: str, connection: sa.Connection) -> JobRow:
    """The caller's job. Raises `ResourceNotFound`, for a missing one and for another tenant's alike."""
    row = rows.fetch(connection, tables.jobs, job_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such job")
    context.touch(row)
    return row
