"""Finds the caller's endpoints, with the split that is in force."""

from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.errors import ResourceNotFound
from tuneship.service.context.context import Context
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import EndpointRow
from tuneship.store.records import endpoint_records


def own_endpoint(context: Context, endpoint_id: str, kind: str | None = None) -> EndpointRow:
    """The caller's endpoint. Raises `ResourceNotFound`, the same for a missing one and for another tenant's."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.endpoints, endpoint_id, client_id=context.client_id)
    return endpoint_in_force(context, row, kind)


def endpoint_in_force(
    context: Context, row: EndpointRow | None, kind: str | None = None
) -> EndpointRow:
    """An endpoint of the caller that was read, with the split that its lease gives it now. Raises 404."""
    if row is None or row["status"] == EndpointStatus.DELETED or kind not in (None, row["kind"]):
        raise ResourceNotFound("there is no such endpoint")
    return endpoint_records.in_force(row, context.now)
