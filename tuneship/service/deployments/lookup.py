"""Finds the caller's deployments."""

from datetime import timedelta

from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.errors import ResourceNotFound
from tuneship.service.context.context import Context
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import DeploymentRow

DELETED_SHOWN_FOR = timedelta(hours=24)


def own_deployment(context: Context, deployment_id: str) -> DeploymentRow:
    """The caller's deployment. Raises `ResourceNotFound`, the same for a missing one and for another tenant's."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.deployments, deployment_id, client_id=context.client_id)
        context.touch_models(connection, [row["model_name"]] if row else [])
    return shown_deployment(context, row)


def shown_deployment(context: Context, row: DeploymentRow | None) -> DeploymentRow:
    """A deployment of the caller, noted as read by the request. Raises `ResourceNotFound`."""
    if row is None or (
        row["status"] == DeploymentStatus.DELETED
        and context.now - row["updated_at"] > DELETED_SHOWN_FOR
    ):
        raise ResourceNotFound("there is no such deployment")
    context.touch(row)
    return row
