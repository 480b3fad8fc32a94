"""A deployment's row, its events and its log change together, so that each transition is told exactly once (§6).

Events follow from what differs between the row before and after. Who may change what: `service/deployments.py`.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.store import deployment_logs
from tuneship.store import queries as rows
from tuneship.store.deployment_logs import LogEntry
from tuneship.store.outbox import emit
from tuneship.store.queries import Row
from tuneship.store.tables import deployments

SUPERVISOR = "supervisor"
SCALING = ("min_replicas", "max_replicas", "auto_scaling", "current_replicas")


def create(connection: sa.Connection, row: Row, now: datetime) -> Row:
    """Record a new deployment."""
    stored = rows.insert(connection, deployments, row)
    emit(connection, "deployment.created", dict(stored), now, status=stored["status"])
    log(connection, stored, now, "info", f"the deployment is {stored['status']}")
    return stored


def update(connection: sa.Connection, row: Row, now: datetime, changes: Mapping[str, Any]) -> None:
    """What a client asked for; replicas that serve go on serving until the new ones are ready."""
    fields = sorted("model_config" if name == "generation" else name for name in changes)
    status = DeploymentStatus.UPDATING
    emit(connection, "deployment.updated", dict(row), now, status=status, fields=fields)
    log(connection, row, now, "info", f"update of {', '.join(fields)}")
    change(connection, row, now, status=status, error=None, **changes)


def change(connection: sa.Connection, row: Row, now: datetime, **changes: Any) -> None:
    """Change columns of `row` and tell what that means: its state, its health, its replicas, a failure."""
    rows.change(connection, deployments, row["id"], now, **changes)
    after = {**row, **changes}

    def tell(kind: str, **data: Any) -> None:
        emit(connection, f"deployment.{kind}", dict(row), now, status=after["status"], **data)

    if after["status"] != row["status"]:
        tell("status_changed", **{"from": row["status"], "to": after["status"]})
        is_bad = after["status"] == DeploymentStatus.FAILED
        text = f"the deployment was {row['status']} and is {after['status']}"
        log(connection, row, now, "error" if is_bad else "info", text)
    if after["health"] != row["health"]:
        tell("health_changed", **{"from": row["health"], "to": after["health"]})
        is_bad = after["health"] == "unhealthy"
        text = f"the deployment was {row['health']} and is {after['health']}"
        log(connection, row, now, "warning" if is_bad else "info", text)
    if any(after[name] != row[name] for name in SCALING):
        tell("scaling_changed", **{name: after[name] for name in SCALING})
        if after["current_replicas"] != row["current_replicas"]:
            log(connection, row, now, "info", f"replicas: {after['current_replicas']}")
    if changes.get("error") is not None:
        tell("error", message=changes["error"]["message"])
        log(connection, row, now, "error", changes["error"]["message"])
    if after["status"] == DeploymentStatus.DELETED:
        tell("deleted")


def change_if_same(connection: sa.Connection, row: Row, now: datetime, **changes: Any) -> bool:
    """`change`, unless somebody else was faster: then the row has to be looked at again."""
    found = rows.fetch(connection, deployments, row["id"], client_id=None)
    if found is None or found["updated_at"] != row["updated_at"]:
        return False
    change(connection, found, now, **changes)
    return True


def log(connection: sa.Connection, row: Row, now: datetime, level: str, message: str) -> None:
    """A line of the deployment's log."""
    deployment_logs.add(connection, LogEntry(row["id"], now, level, SUPERVISOR, message))
