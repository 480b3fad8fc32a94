"""Handlers of endpoints: atomic splits, versions that stop a second rollout, leases that revert a split, and what a
person decides about a rollout.

A plain endpoint is a row of the same kind with one member at 100 %.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract import endpoints as contract
from tuneship.contract.common import render_time
from tuneship.contract.deployments import GONE, SERVING, DeploymentStatus
from tuneship.contract.endpoints import (
    CanaryDecision,
    CanaryEndpoint,
    CanaryEndpointCreate,
    CanaryEndpointPage,
    CanaryEndpointUpdate,
    Endpoint,
    EndpointCreate,
    EndpointDeleted,
    EndpointPage,
    EndpointStatus,
    EndpointUpdate,
    LeaseRenewal,
)
from tuneship.contract.errors import DeploymentError, InvalidRequestError, ResourceNotFound
from tuneship.service.access.hipaa import is_hipaa
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.service.context.quotas import check_quota, is_name_taken
from tuneship.service.endpoints.lookup import own_endpoint
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import CANARY_ENDPOINTS, ENDPOINTS
from tuneship.store.database.tables import DeploymentRow, EndpointRow
from tuneship.store.records import deployment_records, endpoint_records

CANARY = "canary"
PLAIN = "plain"
IS_LIVE = tables.endpoints.c.status != EndpointStatus.DELETED
PAUSED = "the rollout is paused by a person: resume it first"


@serves(contract.create_endpoint)
def create_endpoint(context: Context, endpoint: EndpointCreate) -> Endpoint:
    """Record the endpoint and its deployment."""
    connection = context.transaction
    _check_target(context, connection, endpoint.deployment_id)
    _check_name(context, endpoint.name)
    members = _all_to(endpoint.deployment_id)
    row = _insert(context, connection, PLAIN, new_id("ep"), endpoint.name)
    endpoint_records.swap(connection, row, members, None, context.now)
    return _plain_answer(context, own_endpoint(context, row["id"], PLAIN))


@serves(contract.create_canary_endpoint)
def create_canary_endpoint(context: Context, endpoint: CanaryEndpointCreate) -> CanaryEndpoint:
    """Record the split, and the lease if the request has one."""
    connection = context.transaction
    _check_members(context, connection, endpoint)
    _check_name(context, endpoint.name)
    row = _insert(context, connection, CANARY, new_id("cep"), endpoint.name)
    _swap_split(context, row, endpoint)
    return _answer(context, own_endpoint(context, row["id"], CANARY))


def _insert(
    context: Context, connection: sa.Connection, kind: str, identifier: str, name: str
) -> EndpointRow:
    """Insert a row without members, which its first swap makes version 1. Raises `QuotaExceeded`."""
    most = context.parts.settings.maximum_endpoints
    check_quota(context, tables.endpoints, most, "endpoints", IS_LIVE)
    values: dict[str, Any] = {
        "id": identifier,
        "client_id": context.client_id,
        "created_at": context.now,
        "updated_at": context.now,
        "tags": {},
        "kind": kind,
        "name": name,
        "members": [],
        "status": EndpointStatus.ACTIVE,
        "version": 0,
    }
    return rows.insert(connection, tables.endpoints, values)


def _check_name(context: Context, name: str) -> None:
    # Names are unique among both kinds, which share one address.
    if is_name_taken(context, tables.endpoints.c.name, name, IS_LIVE):
        raise InvalidRequestError("the name is taken by another endpoint", param="name", status=409)


def _all_to(deployment_id: str) -> list[dict[str, Any]]:
    return [{"id": deployment_id, "traffic_percentage": 100}]


def _swap_split(
    context: Context,
    row: EndpointRow,
    update: CanaryEndpointUpdate,
    paused: dict[str, Any] | None = None,
) -> None:
    members = [member.model_dump() for member in update.deployments]
    lease = None if update.lease is None else update.lease.model_dump()
    endpoint_records.swap(
        context.transaction,
        row,
        members,
        lease,
        context.now,
        rollout_id=update.rollout_id,
        large_keys=update.large_keys,
        paused=paused,
    )


def _check_members(
    context: Context,
    connection: sa.Connection,
    update: CanaryEndpointUpdate,
    present: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Check that every member exists, that those with traffic can serve it, and that the hipaa mode does not change.

    Members of the lease's fallback are checked too.
    """
    members_by_field = {"deployments": update.deployments}
    if update.lease is not None:
        members_by_field["lease.fallback"] = update.lease.fallback
    deployments: list[DeploymentRow] = []
    for field, members in members_by_field.items():
        for index, member in enumerate(members):
            row = _member(context, connection, member.id, field)
            status = DeploymentStatus(row["status"])
            # A member without traffic may still be starting, but one that is being deleted never comes back.
            if member.traffic_percentage > 0 or status in GONE:
                _refuse_idle(status, f"{field}[{index}]", field)
            deployments.append(row)
    _refuse_another_mode(context, connection, deployments, present, "deployments")


def _check_target(
    context: Context,
    connection: sa.Connection,
    deployment_id: str,
    present: Sequence[Mapping[str, Any]] = (),
) -> None:
    row = _member(context, connection, deployment_id, "deployment_id")
    _refuse_idle(DeploymentStatus(row["status"]), "the deployment", "deployment_id")
    _refuse_another_mode(context, connection, [row], present, "deployment_id")


def _member(
    context: Context, connection: sa.Connection, deployment_id: str, param: str
) -> DeploymentRow:
    row = rows.fetch(connection, tables.deployments, deployment_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such deployment", param=param)
    context.touch_models(connection, [row["model_name"]])
    context.touch(row)
    return row


def _refuse_another_mode(
    context: Context,
    connection: sa.Connection,
    wanted: Iterable[DeploymentRow],
    present: Sequence[Mapping[str, Any]],
    param: str,
) -> None:
    """Raises `DeploymentError` unless all members of an endpoint are in hipaa mode, or none is, for its whole life.

    The rules for a prompt must not depend on the split's draw. `present`: the members so far. An endpoint of an earlier
    version that mixes both modes may keep them, so that its rollout can be rolled back.
    """
    present_ids = [member["id"] for member in present]
    settings = deployment_records.security_settings_of(connection, context.client_id, present_ids)
    modes = {is_hipaa(row) for row in wanted}
    kept = {is_hipaa(row) for row in settings}
    if len(modes) > max(1, len(kept)) or (kept and not modes <= kept):
        text = "the deployments of an endpoint are in hipaa mode all or none, for its whole life"
        raise DeploymentError(f"{text}: make another endpoint", param=param)


def _refuse_idle(status: DeploymentStatus, who: str, param: str) -> None:
    if status not in SERVING:
        raise DeploymentError(f"{who} is {status}: it cannot take traffic", param=param)


def _etag(row: EndpointRow) -> str:
    return f'"{row["version"]}"'


def _check_version(context: Context, row: EndpointRow) -> None:
    # Of two rollouts on one endpoint `If-Match` stops the slower one.
    message = f"the endpoint has changed: its version is {row['version']}"
    context.refuse_stale(_etag(row), message)


def _answer(context: Context, row: EndpointRow) -> CanaryEndpoint:
    context.headers["ETag"] = _etag(row)
    return _rendered(context, row)


def _plain_answer(context: Context, row: EndpointRow) -> Endpoint:
    context.headers["ETag"] = _etag(row)
    return _plain_rendered(context, row)


def _url(context: Context, row: EndpointRow) -> str:
    return f"{context.parts.public_url}/v1/endpoints/{row['id']}/generate"


def _plain_rendered(context: Context, row: EndpointRow) -> Endpoint:
    target = row["members"][0]["id"]
    return Endpoint.model_validate({**row, "deployment_id": target, "url": _url(context, row)})


def _rendered(context: Context, row: EndpointRow) -> CanaryEndpoint:
    lease: Mapping[str, Any] | None = None
    if row["lease_until"] is not None:
        lease = {
            "seconds": row["lease_seconds"],
            "expires_at": row["lease_until"],
            "fallback": row["lease_fallback"],
            "pausable": row["pausable"],
        }
    return CanaryEndpoint.model_validate(
        {
            **row,
            "deployments": row["members"],
            "url": _url(context, row),
            "lease": lease,
            "large_keys": row["large_keys"] or "spread",
        }
    )


@serves(contract.get_endpoint)
def get_endpoint(context: Context, endpoint_id: str) -> Endpoint | CanaryEndpoint:
    """An endpoint of either kind, in its own form."""
    row = own_endpoint(context, endpoint_id)
    return _answer(context, row) if row["kind"] == CANARY else _plain_answer(context, row)


@serves(contract.get_canary_endpoint)
def get_canary_endpoint(context: Context, endpoint_id: str) -> CanaryEndpoint:
    """The present record, with its version as `ETag`."""
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


@serves(contract.list_canary_endpoints)
def list_canary_endpoints(
    context: Context, limit: int = 20, offset: int = 0, name: str | None = None
) -> CanaryEndpointPage:
    """Newest first."""
    filters = rows.filters_of(tables.endpoints, name=name)
    page = own_page(context, CANARY_ENDPOINTS, filters, limit, offset)
    in_force = [endpoint_records.in_force(row, context.now) for row in page.rows]
    endpoints = [_rendered(context, row) for row in in_force]
    return CanaryEndpointPage(canary_endpoints=endpoints, pagination=page.pagination)


@serves(contract.list_endpoints)
def list_endpoints(
    context: Context, limit: int = 20, offset: int = 0, name: str | None = None
) -> EndpointPage:
    """Newest first."""
    filters = rows.filters_of(tables.endpoints, name=name)
    page = own_page(context, ENDPOINTS, filters, limit, offset)
    endpoints = [_plain_rendered(context, row) for row in page.rows]
    return EndpointPage(endpoints=endpoints, pagination=page.pagination)


@serves(contract.update_endpoint)
def update_endpoint(context: Context, endpoint_id: str, update: EndpointUpdate) -> Endpoint:
    """Rename it, or send all of its traffic to another deployment from the next request on."""
    sent = update.model_dump(exclude_unset=True)
    if not sent:
        raise InvalidRequestError("the update holds no field")
    for field, value in sent.items():
        if value is None:
            raise field_error(field, "must not be null")
    connection = context.transaction
    row = own_endpoint(context, endpoint_id, PLAIN)
    if update.deployment_id is not None:
        _check_target(context, connection, update.deployment_id, row["members"])
    if update.name is not None and update.name != row["name"]:
        _check_name(context, update.name)
    _check_version(context, row)
    name = update.name or row["name"]
    if update.deployment_id is None:
        endpoint_records.rename(connection, row, name, context.now)
    else:
        members = _all_to(update.deployment_id)
        endpoint_records.swap(connection, row, members, None, context.now, name=name)
    return _plain_answer(context, own_endpoint(context, endpoint_id, PLAIN))


@serves(contract.delete_endpoint)
def delete_endpoint(context: Context, endpoint_id: str) -> EndpointDeleted:
    """Delete the endpoint: the next request finds none."""
    return _deleted(context, endpoint_id, PLAIN)


@serves(contract.delete_canary_endpoint)
def delete_canary_endpoint(context: Context, endpoint_id: str) -> EndpointDeleted:
    """Delete the endpoint; a running lease ends with it, since there is no split left to revert."""
    return _deleted(context, endpoint_id, CANARY)


def _deleted(context: Context, endpoint_id: str, kind: str) -> EndpointDeleted:
    connection = context.transaction
    endpoint_records.revert_lapsed(connection, context.client_id, context.now)
    row = own_endpoint(context, endpoint_id, kind)
    _check_version(context, row)
    endpoint_records.retire(connection, row, EndpointStatus.DELETED, context.now)
    return EndpointDeleted(id=endpoint_id)


@serves(contract.update_canary_endpoint)
def update_canary_endpoint(
    context: Context, endpoint_id: str, update: CanaryEndpointUpdate
) -> CanaryEndpoint:
    """Swap the whole split; a refusal leaves the routing as it was."""
    connection = context.transaction
    # A lapsed lease raises the version, which the condition is checked against.
    endpoint_records.revert_lapsed(connection, context.client_id, context.now)
    row = own_endpoint(context, endpoint_id, CANARY)
    _check_members(context, connection, update, row["members"])
    _check_version(context, row)
    _swap_split(context, row, update, _pause_after(row, update))
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


def _pause_after(row: EndpointRow, update: CanaryEndpointUpdate) -> dict[str, Any] | None:
    """The pause that still stands after an update; going back to the fallback lifts it. Raises 409 for a split that a
    pause forbids.
    """
    if row["paused"] is None:
        return None
    wanted, fallback = _traffic(update.model_dump()["deployments"]), _traffic(row["lease_fallback"])
    lease, keys = update.lease, (update.rollout_id, update.large_keys)
    # Another fallback, or another draw of the keys, would be another split in the end.
    if (
        lease is not None
        and wanted == _traffic(row["members"])
        and _traffic(lease.model_dump()["fallback"]) == fallback
        and keys == (row["rollout_id"], row["large_keys"])
    ):
        return row["paused"]
    if wanted != fallback:
        raise InvalidRequestError(PAUSED, status=409)
    return None


def _traffic(members: Iterable[Mapping[str, Any]] | None) -> dict[str, int]:
    shares = {one["id"]: one["traffic_percentage"] for one in members or ()}
    return {name: share for name, share in shares.items() if share > 0}


@serves(contract.renew_canary_lease)
def renew_canary_lease(context: Context, endpoint_id: str, renewal: LeaseRenewal) -> CanaryEndpoint:
    """Extend the lease; 0 seconds end it and keep the split. Ending it raises the version, extending it does not."""
    connection = context.transaction
    row = own_endpoint(context, endpoint_id, CANARY)
    _check_leased(context, row)
    if renewal.seconds == 0:
        if row["paused"] is not None:
            raise InvalidRequestError(PAUSED, status=409)
        endpoint_records.swap(connection, row, row["members"], None, context.now)
    else:
        rows.change(
            connection,
            tables.endpoints,
            endpoint_id,
            row["updated_at"],  # a longer lease is no change of the split
            lease_seconds=renewal.seconds,
            lease_until=context.now + timedelta(seconds=renewal.seconds),
        )
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


def _check_leased(context: Context, row: EndpointRow) -> None:
    if row["lease_until"] is None:
        raise InvalidRequestError("the endpoint has no running lease", status=409)
    _check_version(context, row)


def _decided(
    context: Context, endpoint_id: str, decision: CanaryDecision
) -> tuple[EndpointRow, dict[str, Any]]:
    """The endpoint with a running lease, and the decision as it is kept. Raises 409, and 422 in the hipaa mode for a
    decision without reason or ticket.
    """
    connection = context.transaction
    row = own_endpoint(context, endpoint_id, CANARY)
    _check_leased(context, row)
    members = [_member(context, connection, one["id"], "endpoint_id") for one in row["members"]]
    if any(map(is_hipaa, members)):
        for field in ("reason", "ticket"):
            if getattr(decision, field) is None:
                raise field_error(field, "is required in the hipaa mode", "missing_field")
    by = decision.name or context.audit_facts.key_id
    why = {"reason": decision.reason, "ticket": decision.ticket}
    person = context.audit_facts.person
    # What a provider says about a person counts before what the person writes.
    known = {} if person is None else {"by": person.name, "person": asdict(person)}
    return row, {"at": render_time(context.now), "by": by, **why, **known}


@serves(contract.revert_canary_endpoint)
def revert_canary_endpoint(
    context: Context, endpoint_id: str, decision: CanaryDecision
) -> CanaryEndpoint:
    """Switch to the fallback, as the lease's lapse would."""
    row, decided = _decided(context, endpoint_id, decision)
    endpoint_records.revert(context.transaction, row, context.now, "person", decided)
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


@serves(contract.pause_canary_endpoint)
def pause_canary_endpoint(
    context: Context, endpoint_id: str, decision: CanaryDecision
) -> CanaryEndpoint:
    """Hold the split; the pipeline goes on looking and renewing."""
    row, decided = _decided(context, endpoint_id, decision)
    if not row["pausable"]:
        text = "the pipeline of this rollout cannot be paused: its lease was taken without pausable"
        raise InvalidRequestError(text, status=409)
    if row["paused"] is not None:
        raise InvalidRequestError("the rollout is paused already", status=409)
    endpoint_records.set_pause(context.transaction, row, context.now, decided, is_paused=True)
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


@serves(contract.resume_canary_endpoint)
def resume_canary_endpoint(
    context: Context, endpoint_id: str, decision: CanaryDecision
) -> CanaryEndpoint:
    """Lift the pause; the split may change again."""
    row, decided = _decided(context, endpoint_id, decision)
    if row["paused"] is None:
        raise InvalidRequestError("the rollout is not paused", status=409)
    endpoint_records.set_pause(context.transaction, row, context.now, decided, is_paused=False)
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))
