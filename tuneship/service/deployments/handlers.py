"""Handlers of deployments: they change records and states, and `deployment_keeper.py` makes reality match them."""

import hashlib
import json
from collections.abc import Sequence
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
from tuneship.contract.errors import DeploymentError, InstanceTypeUnavailable, InvalidRequestError
from tuneship.service.access.hipaa import HIPAA, MODE, is_hipaa
from tuneship.service.answers.field_errors import abbreviated, field_error
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.service.context.quotas import check_quota, is_name_taken
from tuneship.service.deployments.faults import faults_of
from tuneship.service.deployments.lookup import DELETED_SHOWN_FOR, own_deployment
from tuneship.service.models.instances import require_serving_type
from tuneship.service.models.lookup import job_of
from tuneship.service.models.safeguards import in_force, refuse_what_others_lack
from tuneship.service.models.served_models import FoundModel, models_of
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import DELETED_DEPLOYMENTS, DEPLOYMENTS
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import DeploymentRow
from tuneship.store.records import deployment_records, endpoint_records

DEFAULT_OUTPUT_TOKENS = 256
MAX_TAGS = 64
# The fields that a PATCH can change.
PATCHED = ("deployment_name", "min_replicas", "max_replicas", "auto_scaling", "tags", "generation")
IS_LIVE = tables.deployments.c.status.in_(LIVE)


@serves(contract.create_deployment)
def create_deployment(context: Context, deployment: DeploymentCreate) -> DeploymentCreated:
    """Refuse a deployment that cannot work, otherwise record it as `creating`."""
    _refuse_unknown_networks(deployment)
    safeguards = in_force(context, deployment.security_settings)
    deployment = deployment.model_copy(update={"security_settings": safeguards})
    if context.parts.settings.allow_fault_injection:
        faults_of(deployment.tags)
    now = context.now
    row: dict[str, Any] = {
        **deployment.model_dump(exclude={"generation", "model_name"}),
        "id": new_id("dep"),
        "client_id": context.client_id,
        "created_at": now,
        "updated_at": now,
        "status": DeploymentStatus.CREATING,
        "model_name": deployment.model_name,
    }
    if deployment.max_replicas is None:
        row["max_replicas"] = max(1, deployment.min_replicas)
    _check_replicas(row)

    # The model's files are tried before the transaction, for which other writers would wait.
    models, model_name = models_of(context), deployment.model_name
    with context.read() as reading:
        models.served(reading, context.client_id, model_name)
    connection = context.transaction
    served = models.find(connection, context.client_id, model_name)
    row["generation"] = _merged_configuration(served.base, {}, deployment.generation)
    _check_safeguards(context, deployment, served)
    require_serving_type(context, deployment, served.base)
    _check_capacity(context, row)
    _check_name(context, deployment.deployment_name)
    most = context.parts.settings.maximum_deployments
    check_quota(context, tables.deployments, most, "deployments", IS_LIVE)
    stored = deployment_records.create(connection, row, now)
    return DeploymentCreated(**_fields(context, stored))


def _refuse_unknown_networks(deployment: DeploymentCreate) -> None:
    """In hipaa mode a `vpc_config` is refused. In other modes it is stored without effect."""
    networks = deployment.vpc_config
    if (
        deployment.security_settings.compliance_mode == HIPAA
        and networks is not None
        and (networks.subnet_ids or networks.security_group_ids)
    ):
        raise field_error("vpc_config", "names networks that this installation does not know")


def _check_safeguards(context: Context, deployment: DeploymentCreate, served: FoundModel) -> None:
    """Refuse a model that cannot be served under the deployment's security settings."""
    safeguards = deployment.security_settings
    refuse_what_others_lack(safeguards, served.base)
    if safeguards.compliance_mode != HIPAA:
        # A tuned model may repeat its training data, so one from hipaa mode stays in that mode.
        job = job_of(context.transaction, context.client_id, deployment.model_name)
        if job is not None and is_hipaa(job):
            raise field_error(
                MODE, "must be hipaa: the model was trained in that mode", "lesser_mode"
            )


def _check_replicas(row: Row) -> None:
    """Check the numbers of replicas on the merged record, since two valid updates may be invalid together."""
    if row["min_replicas"] > row["max_replicas"]:
        raise field_error("max_replicas", "must be at least min_replicas")
    if row["min_replicas"] == 0 and not row["auto_scaling"]:
        raise field_error("min_replicas", "must be at least 1 without auto_scaling")


def _check_capacity(context: Context, row: Row) -> None:
    most = context.parts.settings.replica_processes
    if row["min_replicas"] > most:
        raise InstanceTypeUnavailable(
            f"this installation runs at most {most} replicas of a model", param="min_replicas"
        )


def _merged_configuration(
    base: CataloguedModel, kept: Row, change: ModelConfiguration
) -> dict[str, Any]:
    """The model configuration after a change; a null, or a field that was never set, means the model's own value."""
    own: dict[str, Any] = {
        "context_length": base.context_length,
        "max_output_tokens": min(DEFAULT_OUTPUT_TOKENS, base.context_length),
        "default_temperature": 0.7,
        "default_top_p": 1.0,
    }
    merged = {**kept, **change.model_dump(exclude_unset=True)}
    merged = {name: own[name] if merged.get(name) is None else merged[name] for name in own}
    if merged["context_length"] > base.context_length:
        raise field_error(
            "model_config.context_length", f"must be at most the model's {base.context_length}"
        )
    if merged["max_output_tokens"] > merged["context_length"]:
        raise field_error("model_config.max_output_tokens", "must be at most context_length")
    return merged


def _check_name(context: Context, name: str) -> None:
    if is_name_taken(context, tables.deployments.c.deployment_name, name, IS_LIVE):
        raise DeploymentError("the name is taken by another deployment", param="deployment_name")


def _fields(context: Context, row: DeploymentRow) -> dict[str, Any]:
    address = f"{context.parts.public_url}/v1/deployments/{row['id']}/generate"
    return {**row, "endpoint": address, "model_config": row["generation"]}


@serves(contract.get_deployment)
def get_deployment(context: Context, deployment_id: str) -> Deployment:
    """The present record, with its `ETag`."""
    row = own_deployment(context, deployment_id)
    context.headers["ETag"] = etag_of(row)
    return Deployment(**_fields(context, row))


def etag_of(row: DeploymentRow) -> str:
    """The ETag of the fields that a PATCH can change: going from `updating` to `running` does not change it."""
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
    """Newest first; deleted deployments only with `status=deleted`, and for a day."""

    def touch(connection: sa.Connection, shown: Sequence[DeploymentRow]) -> None:
        context.touch_models(connection, {row["model_name"] for row in shown})
        context.touch(*shown)

    table, listing = tables.deployments, DEPLOYMENTS
    filters = rows.filters_of(table, tags, model_name=model_name, region=region, status=status)
    if status is DeploymentStatus.DELETED:
        listing = DELETED_DEPLOYMENTS
        filters.append(table.c.updated_at >= context.now - DELETED_SHOWN_FOR)
    page = own_page(context, listing, filters, context.page_size(limit), offset, touch)
    deployments = [DeploymentListItem(**_fields(context, row)) for row in page.rows]
    return DeploymentPage(deployments=deployments, pagination=page.pagination)


@serves(contract.update_deployment)
def update_deployment(
    context: Context, deployment_id: str, update: DeploymentUpdate
) -> DeploymentUpdated:
    """Merge the patch. The replicas serve on meanwhile."""
    if not update.model_fields_set:
        raise InvalidRequestError("the update holds no field")
    connection = context.transaction
    row = own_deployment(context, deployment_id)
    if DeploymentStatus.UPDATING not in MOVES[DeploymentStatus(row["status"])]:
        raise DeploymentError(f"the deployment is {row['status']}")
    context.refuse_stale(etag_of(row), "the deployment has changed since")
    changes = _checked_changes(context, row, update)
    _check_replicas({**row, **changes})
    _check_capacity(context, {**row, **changes})
    deployment_records.update(connection, row, context.now, changes)
    merged = own_deployment(context, deployment_id)
    context.headers["ETag"] = etag_of(merged)
    return DeploymentUpdated(**_fields(context, merged))


def _checked_changes(
    context: Context, row: DeploymentRow, update: DeploymentUpdate
) -> dict[str, Any]:
    changes = update.model_dump(exclude_unset=True, exclude={"tags", "generation"})
    for name, value in changes.items():
        if value is None:
            raise field_error(name, "must not be null")
    if update.tags is not None:
        merged = {**row["tags"], **update.tags}
        tags = changes["tags"] = {key: value for key, value in merged.items() if value is not None}
        if len(tags) > MAX_TAGS:
            raise field_error("tags", f"must have at most {MAX_TAGS} keys together")
        if context.parts.settings.allow_fault_injection:
            faults_of(tags)
    if update.generation is not None:
        served = models_of(context).find(context.transaction, context.client_id, row["model_name"])
        changes["generation"] = _merged_configuration(
            served.base, row["generation"], update.generation
        )
    if changes.get("deployment_name", row["deployment_name"]) != row["deployment_name"]:
        _check_name(context, changes["deployment_name"])
    return changes


@serves(contract.delete_deployment)
def delete_deployment(
    context: Context, deployment_id: str, force: bool = False
) -> DeploymentDeleted:
    """Mark a deployment for deletion; the supervisor drains and unloads it. Refused while endpoints use it, unless
    forced.
    """
    connection = context.transaction
    row = own_deployment(context, deployment_id)
    status = DeploymentStatus(row["status"])
    # A retried delete names a version that its first try has ended.
    if status not in GONE:
        context.refuse_stale(etag_of(row), "the deployment has changed since")
    if status in GONE:
        if force and status == DeploymentStatus.DELETING and not row["is_forced"]:
            # It also cuts the drain of an earlier delete short.
            deployment_records.change(connection, row, context.now, is_forced=True)
        return DeploymentDeleted(id=deployment_id, status=status)
    users = endpoint_records.endpoints_routing_to(connection, context.client_id, deployment_id)
    if users and not force:
        names = abbreviated([user["id"] for user in users])
        raise DeploymentError(f"endpoints still send it traffic: {names}")
    for user in users:
        endpoint_records.retire(connection, user, EndpointStatus.INACTIVE, context.now)
    endpoint_records.remove_idle_member(connection, context.client_id, deployment_id, context.now)
    status = DeploymentStatus.DELETING
    deployment_records.change(connection, row, context.now, status=status, is_forced=force)
    return DeploymentDeleted(id=deployment_id, status=status)
