"""Changes a deployment's row, its events and its log together, so that each transition is reported exactly once (§6).

The events follow from the difference between the old and the new row. Who may change what is decided in
`tuneship/service/deployments/`.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.store.database import rows
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import DeploymentRow, deployments
from tuneship.store.records import deployment_logs
from tuneship.store.records.deployment_logs import LogEntry
from tuneship.store.records.outbox import emit

SUPERVISOR = "supervisor"
# The states in which a deployment has replicas, or is to have some.
SERVING = (DeploymentStatus.CREATING, DeploymentStatus.RUNNING, DeploymentStatus.UPDATING)
SCALING = ("min_replicas", "max_replicas", "auto_scaling", "current_replicas")


def with_replicas(connection: sa.Connection, columns: Sequence[str]) -> list[Row]:
    """These columns of every client's deployments that have or should have replicas."""
    query = sa.select(*(deployments.c[name] for name in columns))
    return rows.fetch_all(connection, query.where(deployments.c.status.in_(SERVING)))


def deleted_since(connection: sa.Connection, since: datetime) -> list[Row]:
    """Id and model of the deployments of tuned models that were deleted since a moment, of every client."""
    query = sa.select(deployments.c.id, deployments.c.model_name).where(
        deployments.c.status == DeploymentStatus.DELETED,
        deployments.c.updated_at >= since,
        deployments.c.model_name.startswith("ft:"),
    )
    return rows.fetch_all(connection, query)


def live_ids_of_model(connection: sa.Connection, client_id: str, model_name: str) -> list[str]:
    """The ids of the client's deployments of a model, oldest first, without deleted ones."""
    query = sa.select(deployments.c.id).where(
        deployments.c.client_id == client_id,
        deployments.c.model_name == model_name,
        deployments.c.status != DeploymentStatus.DELETED,
    )
    return list(connection.scalars(query.order_by(deployments.c.created_at, deployments.c.id)))


def serving_of_model(
    connection: sa.Connection, client_id: str, model_name: str
) -> list[DeploymentRow]:
    """The client's deployments of a model that serve, then those that will serve soon, oldest first."""
    where = (
        deployments.c.client_id == client_id,
        deployments.c.model_name == model_name,
        deployments.c.status.in_(SERVING),
    )
    found = rows.matching(connection, deployments, *where)
    is_new = DeploymentStatus.CREATING
    return sorted(found, key=lambda row: (row["status"] == is_new, row["created_at"], row["id"]))


def security_settings_of(
    connection: sa.Connection, client_id: str, ids: Iterable[str]
) -> Sequence[Row]:
    """The `security_settings` of the client's deployments with these ids, as rows with this one column."""
    query = sa.select(deployments.c.security_settings).where(
        deployments.c.client_id == client_id, deployments.c.id.in_(ids)
    )
    return rows.fetch_all(connection, query)


def create(connection: sa.Connection, row: Row, now: datetime) -> DeploymentRow:
    """Insert a new deployment and report it."""
    stored = rows.insert(connection, deployments, row)
    emit(connection, "deployment.created", stored, now, status=stored["status"])
    log(connection, stored, now, "info", f"the deployment is {stored['status']}")
    return stored


def update(
    connection: sa.Connection, row: DeploymentRow, now: datetime, changes: Mapping[str, Any]
) -> None:
    """Store a client's changes; the replicas keep serving as before until new ones are ready."""
    # Events and log name the fields as the API does, not as the columns.
    fields = sorted("model_config" if name == "generation" else name for name in changes)
    status = DeploymentStatus.UPDATING
    emit(connection, "deployment.updated", row, now, status=status, fields=fields)
    log(connection, row, now, "info", f"update of {', '.join(fields)}")
    change(connection, row, now, status=status, error=None, **changes)


def change(connection: sa.Connection, row: DeploymentRow, now: datetime, **changes: Any) -> None:
    """Change columns of a row, and emit events and log lines for changes of state, health, replicas and failure."""
    rows.change(connection, deployments, row["id"], now, **changes)
    before: Row = row
    after: Row = {**row, **changes}

    def report(kind: str, **data: Any) -> None:
        emit(connection, f"deployment.{kind}", row, now, status=after["status"], **data)

    if after["status"] != row["status"]:
        report("status_changed", **{"from": row["status"], "to": after["status"]})
        is_bad = after["status"] == DeploymentStatus.FAILED
        text = f"the deployment was {row['status']} and is {after['status']}"
        log(connection, row, now, "error" if is_bad else "info", text)
    if after["health"] != row["health"]:
        report("health_changed", **{"from": row["health"], "to": after["health"]})
        is_bad = after["health"] == "unhealthy"
        text = f"the deployment was {row['health']} and is {after['health']}"
        log(connection, row, now, "warning" if is_bad else "info", text)
    if any(after[name] != before[name] for name in SCALING):
        report("scaling_changed", **{name: after[name] for name in SCALING})
        if after["current_replicas"] != row["current_replicas"]:
            log(connection, row, now, "info", f"replicas: {after['current_replicas']}")
    if changes.get("error") is not None:
        report("error", message=changes["error"]["message"])
        log(connection, row, now, "error", changes["error"]["message"])
    if after["status"] == DeploymentStatus.DELETED:
        report("deleted")


def note_wanted(connection: sa.Connection, deployment_id: str, replicas: int) -> None:
    """Note on how many replicas a deployment is to be served, which is no change that a client sees."""
    noted = sa.update(deployments).where(deployments.c.id == deployment_id)
    connection.execute(noted.values(wanted_replicas=replicas))


def change_if_same(connection: sa.Connection, row: Row, now: datetime, **changes: Any) -> bool:
    """Like `change`, but returns False and does nothing if the row has been changed since it was read."""
    # Every change sets `updated_at`, so it shows whether the row is still the one that was read.
    current = rows.fetch(connection, deployments, row["id"], client_id=None)
    if current is None or current["updated_at"] != row["updated_at"]:
        return False
    change(connection, current, now, **changes)
    return True


def log(
    connection: sa.Connection, row: DeploymentRow, now: datetime, level: str, message: str
) -> None:
    """Append a line of the supervisor to the deployment's log."""
    deployment_logs.add(connection, LogEntry(row["id"], now, level, SUPERVISOR, message))
