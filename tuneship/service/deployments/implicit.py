"""Deployments that the service makes by itself: a model that nothing serves is asked by its name.

An implicit deployment sleeps when it is idle and is deleted after a day without requests. It has a name made from the
model's, so that there is one at most for each client and model, and its job's security settings. It takes part in no
endpoint: gates and canaries stay the only way to traffic behind a name.
"""

import asyncio
import hashlib
import re
import time
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from tuneship.contract.deployments import (
    GONE,
    LIVE,
    DeploymentCreate,
    DeploymentSecuritySettings,
    DeploymentStatus,
)
from tuneship.contract.errors import DeploymentError, InternalError, ModelNotFound
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.context.context import Context
from tuneship.service.deployments.handlers import create_deployment
from tuneship.service.models.lookup import job_of
from tuneship.service.models.served_models import models_of
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import DeploymentRow
from tuneship.store.records import deployment_records, endpoint_records, metric_windows

# The first request to a model waits so long for its deployment; clients wait for minutes.
READY_WITHIN_S = 60.0
GONE_WITHIN_S = 10.0
POLL_S = 0.05
IDLE_FOR = timedelta(days=1)
# Making and deleting deployments is not part of asking a model, or of deleting one.
SCOPE = "deployments:write"
NOBODY_SERVES = (
    "no deployment serves the model: ask its operator to deploy it, or for a key that may do so; "
)
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")
MOST_OF_A_NAME = 100


def implicit_name(model_name: str) -> str:
    """The name of the model's implicit deployment: readable, and different for different models."""
    digest = hashlib.sha256(model_name.encode()).hexdigest()[:12]
    return f"implicit {NOT_IN_A_NAME.sub(' ', model_name)[:MOST_OF_A_NAME]} {digest}"


def make_implicit(context: Context, model_name: str) -> str:
    """Make the model's implicit deployment in a transaction of its own, and return its id.

    Another request may have made it meanwhile: then that one is returned. Raises `ModelNotFound`, `PermissionDenied`
    where the key may make no deployment, and the refusals of a new one.
    """
    own = replace(
        context,
        audit_facts=AuditFacts(
            key_id=context.audit_facts.key_id,
            person=context.audit_facts.person,
            address=context.audit_facts.address,
            action="create_implicit_deployment",
            is_change=True,
        ),
        headers={},
        after_commit=[],
        after_rollback=[],
    )
    try:
        wanted = _wanted(own, model_name)
        own.require(SCOPE, NOBODY_SERVES)
        made = create_deployment(own, wanted)
        rows.change(own.transaction, tables.deployments, made.id, own.now, implicit=True)
        own.audit_facts.created_id = made.id
        own.add_audit_entry(own.transaction, 201)
        own.commit()
    except BaseException as error:
        own.roll_back(error)
        is_made = isinstance(error, DeploymentError) and error.param == "deployment_name"
        with context.read() as connection:
            found = _live_of(connection, context.client_id, model_name) if is_made else []
        if not found:
            raise
        return found[0]["id"]
    return made.id


def _wanted(context: Context, model_name: str) -> DeploymentCreate:
    with context.read() as connection:
        found = models_of(context).find(connection, context.client_id, model_name)
        job = job_of(connection, context.client_id, model_name)
    fields = DeploymentSecuritySettings.model_fields
    kept: dict[str, Any] = {} if job is None else job["security_settings"]
    fields_kept = {name: value for name, value in kept.items() if name in fields}
    configuration = {
        "default_temperature": 1.0,
        "default_top_p": 1.0,
        "max_output_tokens": found.base.context_length,
    }
    try:
        return DeploymentCreate.model_validate(
            {
                "model_name": model_name,
                "deployment_name": implicit_name(model_name),
                "auto_scaling": True,
                "min_replicas": 0,
                "model_config": configuration,
                "security_settings": fields_kept,
            }
        )
    except ValidationError:
        text = "model_name names a model that does not exist"
        raise ModelNotFound(text, param="model_name") from None


def _live_of(connection: sa.Connection, client_id: str, model_name: str) -> list[DeploymentRow]:
    table = tables.deployments
    return rows.matching(
        connection,
        table,
        table.c.client_id == client_id,
        table.c.model_name == model_name,
        table.c.implicit,
        table.c.status.in_(LIVE),
    )


async def wait_until_made(context: Context, deployment_id: str) -> None:
    """Wait until a deployment is no longer being created. Raises `InternalError` (503) when that takes too long."""
    end = time.monotonic() + READY_WITHIN_S

    def status() -> str:
        with context.read() as connection:
            row = rows.fetch(
                connection, tables.deployments, deployment_id, client_id=context.client_id
            )
        return DeploymentStatus.DELETED if row is None else row["status"]

    while await asyncio.to_thread(status) == DeploymentStatus.CREATING:
        if time.monotonic() > end:
            text = "the model is still being loaded"
            raise InternalError(text, status=503, retry_after=5)
        await asyncio.sleep(POLL_S)


def remove_implicit(context: Context, model_name: str) -> None:
    """Delete the model's implicit deployment and wait for its end, so that the model can be deleted.

    Raises `PermissionDenied` where the key may delete no deployment, and `DeploymentError` (503) while its last
    requests are still answered.
    """
    database, end = context.parts.database, time.monotonic() + GONE_WITHIN_S
    with database.write(context.client_id) as connection:
        found = _live_of(connection, context.client_id, model_name)
        found = [row for row in found if not _is_routed_to(connection, row)]
        if found:
            context.require(SCOPE, "a deployment serves the model; ")
        for row in found:
            status = DeploymentStatus.DELETING
            deployment_records.change(connection, row, context.now, status=status)
    waiting = {row["id"] for row in found}
    while waiting:
        with database.read() as connection:
            live = deployment_records.live_ids_of_model(connection, context.client_id, model_name)
        waiting &= set(live)
        if waiting and time.monotonic() > end:
            text = "the model still answers requests: try again"
            raise DeploymentError(text, status=503, retry_after=5)
        if waiting:
            time.sleep(POLL_S)


def delete_idle(database: Database, now: datetime) -> None:
    """Delete the implicit deployments of all clients that no request has come to for a day."""
    table, since = tables.deployments, now - IDLE_FOR
    is_old = sa.and_(table.c.implicit, table.c.created_at < since, table.c.status.not_in(GONE))
    with database.read() as connection:
        clients = {row["client_id"] for row in rows.matching(connection, table, is_old)}
    for client_id in sorted(clients):
        with database.write(client_id) as connection:
            own = table.c.client_id == client_id
            for row in rows.matching(connection, table, own, is_old):
                was_used = metric_windows.has_requests(connection, row["id"], since.timestamp())
                if not was_used and not _is_routed_to(connection, row):
                    status = DeploymentStatus.DELETING
                    deployment_records.change(connection, row, now, status=status)


def _is_routed_to(connection: sa.Connection, row: DeploymentRow) -> bool:
    """Whether an endpoint uses the deployment, so that somebody wants to keep it."""
    return bool(endpoint_records.endpoints_naming(connection, row["client_id"], row["id"]))
