"""What the deployment operations do: records and their states. `reconciler.py` brings reality in line."""

import hashlib
import json
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract import deployments as contract
from tuneship.contract.deployments import (
    GONE,
    LIVE,
    MOVES,
    Deployment,
    DeploymentCreate,
    DeploymentCreated,
    DeploymentDeleted,
    DeploymentListItem,
    DeploymentPage,
    DeploymentStatus,
    DeploymentUpdate,
    DeploymentUpdated,
    ModelConfiguration,
)
from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.errors import (
    DeploymentError,
    InstanceTypeUnavailable,
    InvalidRequestError,
    ResourceNotFound,
)
from tuneship.service.access.hipaa import HIPAA, MODE, is_hipaa
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.common.fault_injection import faults_of
from tuneship.service.common.refusals import abbreviated, refused
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_quota
from tuneship.service.models.handlers import job_of, served_model
from tuneship.service.models.instances import require_serving_type
from tuneship.service.models.safeguards import in_force, is_sealed_as_asked, refuse_what_others_lack
from tuneship.store import deployment_records, endpoint_records, tables
from tuneship.store import queries as rows
from tuneship.store.identifiers import new_id
from tuneship.store.list_counters import DELETED_DEPLOYMENTS, DEPLOYMENTS
from tuneship.store.queries import Row

DEFAULT_OUTPUT_TOKENS = 256
DELETED_SHOWN = timedelta(hours=24)
MOST_TAGS = 64
PATCHED = ("deployment_name", "min_replicas", "max_replicas", "auto_scaling", "tags", "generation")


@serves(contract.create_deployment)
def create_deployment(context: Context, deployment: DeploymentCreate) -> DeploymentCreated:
    """Refuse what cannot work, then record it as `creating`."""
    _check_networks(deployment)
    safeguards = in_force(context, deployment.security_settings)
    deployment = deployment.model_copy(update={"security_settings": safeguards})
    faults_of(deployment.tags, allowed=context.parts.settings.allow_fault_injection)
    deployment_id = new_id("dep")
    row: dict[str, Any] = {
        **deployment.model_dump(exclude={"generation", "model_name"}),
        "id": deployment_id,
        "client_id": context.client_id,
        "created_at": context.now,
        "updated_at": context.now,
        "status": DeploymentStatus.CREATING,
        "model_name": deployment.model_name,
        "max_replicas": (
            max(1, deployment.min_replicas)
            if deployment.max_replicas is None
            else deployment.max_replicas
        ),
    }
    _check_replicas(row)
    connection = context.transaction
    served = served_model(connection, context.parts, context.client_id, deployment.model_name)
    row["generation"] = _generation(served.base, {}, deployment.generation)
    refuse_what_others_lack(safeguards, served.base)
    if served.object_id and not is_sealed_as_asked(context, safeguards, served.object_id):
        text = "the model's files were stored unsealed by an earlier version: tune it again"
        raise DeploymentError(text, param="model_name")
    _check_mode(context, connection, deployment)
    require_serving_type(context.parts, deployment, served.base)
    _check_capacity(context, row)
    _check_name(context, connection, deployment.deployment_name)
    most, is_live = (
        context.parts.settings.maximum_deployments,
        tables.deployments.c.status.in_(LIVE),
    )
    check_quota(context, tables.deployments, most, "deployments", is_live)
    stored = deployment_records.create(connection, row, context.now)
    return DeploymentCreated(**_fields(context, stored))


def _check_networks(deployment: DeploymentCreate) -> None:
    """Elsewhere a `vpc_config` is kept without effect; in hipaa mode nobody may think that it has one."""
    named = deployment.vpc_config
    if (
        deployment.security_settings.compliance_mode == HIPAA
        and named is not None
        and (named.subnet_ids or named.security_group_ids)
    ):
        raise refused("vpc_config", "names networks that this installation does not know")


def _check_mode(context: Context, connection: sa.Connection, deployment: DeploymentCreate) -> None:
    """A tuned model may repeat what it was trained on: what was trained in hipaa mode is served in that mode only."""
    if deployment.security_settings.compliance_mode == HIPAA:
        return
    job = job_of(connection, context.client_id, deployment.model_name)
    if job is not None and is_hipaa(job):
        raise refused(MODE, "must be hipaa: the model was trained in that mode", "lesser_mode")


def _check_replicas(row: Row) -> None:
    """On the merged record, so that an update cannot pass in two halves."""
    if row["min_replicas"] > row["max_replicas"]:
        raise refused("max_replicas", "must be at least min_replicas")
    if row["min_replicas"] == 0 and not row["auto_scaling"]:
        raise refused("min_replicas", "must be at least 1 without auto_scaling")


def _check_capacity(context: Context, row: Row) -> None:
    most = context.parts.settings.replica_processes
    if row["min_replicas"] > most:
        raise InstanceTypeUnavailable(
            f"this installation runs at most {most} replicas of a model", param="min_replicas"
        )


def _generation(base: CataloguedModel, kept: Row, change: ModelConfiguration) -> dict[str, Any]:
    """Merged limits and defaults; a null, or nothing set before, means the model's own."""
    own: dict[str, Any] = {
        "context_length": base.context_length,
        "max_output_tokens": min(DEFAULT_OUTPUT_TOKENS, base.context_length),
        "default_temperature": 0.7,
        "default_top_p": 1.0,
    }
    merged = {**kept, **change.model_dump(exclude_unset=True)}
    merged = {name: own[name] if merged.get(name) is None else merged[name] for name in own}
    if merged["context_length"] > base.context_length:
        raise refused(
            "model_config.context_length", f"must be at most the model's {base.context_length}"
        )
    if merged["max_output_tokens"] > merged["context_length"]:
        raise refused("model_config.max_output_tokens", "must be at most context_length")
    return merged


def _check_name(context: Context, connection: sa.Connection, name: str) -> None:
    table = tables.deployments
    if rows.count(
        connection,
        table,
        table.c.client_id == context.client_id,
        table.c.deployment_name == name,
        table.c.status.in_(LIVE),
    ):
        raise DeploymentError("the name is taken by another deployment", param="deployment_name")


def _fields(context: Context, row: Row) -> dict[str, Any]:
    address = f"{context.parts.public_url}/v1/deployments/{row['id']}/generate"
    return {**row, "endpoint": address, "model_config": row["generation"]}


def own_deployment(context: Context, deployment_id: str) -> Row:
    """The caller's deployment. Raises `ResourceNotFound`, the same for a missing and for another's."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.deployments, deployment_id, client_id=context.client_id)
        context.touch_models(connection, [row["model_name"]] if row else [])
    return shown_deployment(context, row)


def shown_deployment(context: Context, row: Row | None) -> Row:
    """One of the caller's that was read; the request has looked at it. Raises `ResourceNotFound`."""
    if row is None or _is_forgotten(row, context.now):
        raise ResourceNotFound("there is no such deployment")
    context.touch(row)
    return row


def _is_forgotten(row: Row, now: datetime) -> bool:
    return row["status"] == DeploymentStatus.DELETED and now - row["updated_at"] > DELETED_SHOWN


@serves(contract.get_deployment)
def get_deployment(context: Context, deployment_id: str) -> Deployment:
    """The record as it stands, with its `ETag`."""
    row = own_deployment(context, deployment_id)
    context.headers["ETag"] = etag_of(row)
    return Deployment(**_fields(context, row))


def etag_of(row: Row) -> str:
    """Of what a PATCH can change, so that a deployment that goes from `updating` to `running` keeps it."""
    settings = json.dumps([row["id"], *(row[name] for name in PATCHED)], sort_keys=True)
    return f'"{hashlib.sha256(settings.encode()).hexdigest()[:32]}"'


@serves(contract.list_deployments)
def list_deployments(  # noqa: PLR0913 - the description's own query parameters
    context: Context,
    limit: int = 20,
    offset: int = 0,
    status: DeploymentStatus | None = None,
    model_name: str | None = None,
    region: str | None = None,
    tags: dict[str, str] | None = None,
) -> DeploymentPage:
    """Newest first; deleted ones only when they are asked for, and for a day."""
    limit = context.page_size(limit)
    table = tables.deployments
    filters = rows.tags_match(table, tags)
    listing = DEPLOYMENTS
    if status is DeploymentStatus.DELETED:
        listing = DELETED_DEPLOYMENTS
        filters.append(table.c.updated_at >= context.now - DELETED_SHOWN)
    wanted = {"model_name": model_name, "region": region, "status": status}
    filters += [table.c[name] == value for name, value in wanted.items() if value is not None]
    with context.read() as connection:
        page = rows.listed(
            connection, listing, context.client_id, filters, limit=limit, offset=offset
        )
        context.touch_models(connection, {row["model_name"] for row in page.rows})
    for row in page.rows:
        context.touch(row)
    return DeploymentPage.model_validate(
        {
            "deployments": [DeploymentListItem(**_fields(context, row)) for row in page.rows],
            "pagination": page.pagination,
        }
    )


@serves(contract.update_deployment)
def update_deployment(
    context: Context, deployment_id: str, update: DeploymentUpdate
) -> DeploymentUpdated:
    """Merge the patch; replicas that serve go on serving meanwhile."""
    if not update.model_fields_set:
        raise InvalidRequestError("the update holds no field")
    connection = context.transaction
    row = own_deployment(context, deployment_id)
    if DeploymentStatus.UPDATING not in MOVES[DeploymentStatus(row["status"])]:
        raise DeploymentError(f"the deployment is {row['status']}")
    context.refuse_stale(etag_of(row), "the deployment has changed since")
    changes = _changes(context, connection, row, update)
    _check_replicas({**row, **changes})
    _check_capacity(context, {**row, **changes})
    deployment_records.update(connection, row, context.now, changes)
    merged = own_deployment(context, deployment_id)
    context.headers["ETag"] = etag_of(merged)
    return DeploymentUpdated(**_fields(context, merged))


def _changes(
    context: Context, connection: sa.Connection, row: Row, update: DeploymentUpdate
) -> dict[str, Any]:
    sent = update.model_dump(exclude_unset=True, exclude={"tags", "generation"})
    for name, value in sent.items():
        if value is None:
            raise refused(name, "must not be null")
    if update.tags is not None:
        merged = {**row["tags"], **update.tags}
        sent["tags"] = {key: value for key, value in merged.items() if value is not None}
        if len(sent["tags"]) > MOST_TAGS:
            raise refused("tags", f"must have at most {MOST_TAGS} keys together")
        faults_of(sent["tags"], allowed=context.parts.settings.allow_fault_injection)
    if update.generation is not None:
        served = served_model(connection, context.parts, context.client_id, row["model_name"])
        sent["generation"] = _generation(served.base, row["generation"], update.generation)
    if sent.get("deployment_name", row["deployment_name"]) != row["deployment_name"]:
        _check_name(context, connection, sent["deployment_name"])
    return sent


@serves(contract.delete_deployment)
def delete_deployment(
    context: Context, deployment_id: str, force: bool = False
) -> DeploymentDeleted:
    """Mark it; the supervisor drains and unloads. Endpoints that send it traffic refuse, unless forced."""
    connection = context.transaction
    row = own_deployment(context, deployment_id)
    status = DeploymentStatus(row["status"])
    if status not in GONE:  # a repeat comes with the version that its first try has ended
        context.refuse_stale(etag_of(row), "the deployment has changed since")
    if force and status != DeploymentStatus.DELETED:  # also one that somebody lets drain by now
        context.after_commit.append(lambda: context.parts.in_flight.end_now(deployment_id))
    if status in GONE:
        return DeploymentDeleted(id=deployment_id, status=status)
    users = endpoint_records.users_of(connection, context.client_id, deployment_id)
    if users and not force:
        names = abbreviated([user["id"] for user in users])
        raise DeploymentError(f"endpoints still send it traffic: {names}")
    for user in users:
        endpoint_records.retire(connection, user, EndpointStatus.INACTIVE, context.now)
    endpoint_records.remove_idle_member(connection, context.client_id, deployment_id, context.now)
    status = DeploymentStatus.DELETING
    deployment_records.change(connection, row, context.now, status=status)
    return DeploymentDeleted(id=deployment_id, status=status)
