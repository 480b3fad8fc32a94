"""What the endpoint operations do: one atomic split, versions against a second driver, leases that revert.

A plain endpoint is a row of the same kind with one member at 100 %.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract import endpoints as contract
from tuneship.contract.deployments import GONE, SERVING, DeploymentStatus
from tuneship.contract.endpoints import (
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
    LeaseRequest,
    Member,
)
from tuneship.contract.errors import DeploymentError, InvalidRequestError, ResourceNotFound
from tuneship.service.access.hipaa import is_hipaa
from tuneship.service.common.refusals import refused
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_quota
from tuneship.store import endpoint_records, tables
from tuneship.store import queries as rows
from tuneship.store.identifiers import new_id
from tuneship.store.list_counters import CANARY_ENDPOINTS, ENDPOINTS
from tuneship.store.queries import Row

CANARY = "canary"
PLAIN = "plain"


@serves(contract.create_endpoint)
def create_endpoint(context: Context, endpoint: EndpointCreate) -> Endpoint:
    """Record where it routes to."""
    connection = context.transaction
    _check_target(context, connection, endpoint.deployment_id)
    _check_name(context, connection, endpoint.name)
    members = _all_to(endpoint.deployment_id)
    row = _insert(context, connection, PLAIN, new_id("ep"), endpoint.name)
    endpoint_records.swap(connection, row, members, None, context.now)
    return _plain_answer(context, own_endpoint(context, row["id"], PLAIN))


@serves(contract.create_canary_endpoint)
def create_canary_endpoint(context: Context, endpoint: CanaryEndpointCreate) -> CanaryEndpoint:
    """Record the split, and the lease when one is asked for."""
    connection = context.transaction
    _check_members(context, connection, endpoint)
    _check_name(context, connection, endpoint.name)
    members = _plain(endpoint.deployments)
    row = _insert(context, connection, CANARY, new_id("cep"), endpoint.name)
    endpoint_records.swap(connection, row, members, _lease(endpoint.lease), context.now)
    return _answer(context, own_endpoint(context, row["id"], CANARY))


def _insert(
    context: Context, connection: sa.Connection, kind: str, identifier: str, name: str
) -> Row:
    """A row without members; its first swap makes it version 1. Raises `QuotaExceeded`."""
    is_live = tables.endpoints.c.status != EndpointStatus.DELETED
    most = context.parts.settings.maximum_endpoints
    check_quota(context, tables.endpoints, most, "endpoints", is_live)
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


def _check_name(context: Context, connection: sa.Connection, name: str) -> None:
    """Unique among both kinds, for they share one address."""
    table = tables.endpoints
    if rows.count(
        connection,
        table,
        table.c.client_id == context.client_id,
        table.c.name == name,
        table.c.status != EndpointStatus.DELETED,
    ):
        raise InvalidRequestError("the name is taken by another endpoint", param="name", status=409)


def _all_to(deployment_id: str) -> list[dict[str, Any]]:
    return [{"id": deployment_id, "traffic_percentage": 100}]


def _plain(members: Sequence[Member]) -> list[dict[str, Any]]:
    return [member.model_dump() for member in members]


def _lease(lease: LeaseRequest | None) -> dict[str, Any] | None:
    return None if lease is None else lease.model_dump()


def _check_members(
    context: Context,
    connection: sa.Connection,
    update: CanaryEndpointUpdate,
    present: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Every member exists; whoever gets traffic, now or by the fallback, can serve it; none brings another mode."""
    sets = {"deployments": update.deployments}
    if update.lease is not None:
        sets["lease.fallback"] = update.lease.fallback
    places = [
        (f"{name}[{at}]", one) for name, members in sets.items() for at, one in enumerate(members)
    ]
    found: list[Row] = []
    for place, member in places:
        row = _member(context, connection, member.id, place.partition("[")[0])
        status = DeploymentStatus(row["status"])
        if member.traffic_percentage > 0 or status in GONE:
            _refuse_idle(status, place, place.partition("[")[0])
        found.append(row)
    _refuse_another_mode(context, connection, found, present, "deployments")


def _check_target(
    context: Context,
    connection: sa.Connection,
    deployment_id: str,
    present: Sequence[Mapping[str, Any]] = (),
) -> None:
    row = _member(context, connection, deployment_id, "deployment_id")
    _refuse_idle(DeploymentStatus(row["status"]), "the deployment", "deployment_id")
    _refuse_another_mode(context, connection, [row], present, "deployment_id")


def _member(context: Context, connection: sa.Connection, deployment_id: str, param: str) -> Row:
    row = rows.fetch(connection, tables.deployments, deployment_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such deployment", param=param)
    context.touch_models(connection, [row["model_name"]])
    context.touch(row)
    return row


def _refuse_another_mode(
    context: Context,
    connection: sa.Connection,
    wanted: Iterable[Row],
    present: Sequence[Mapping[str, Any]],
    param: str,
) -> None:
    """An address keeps hipaa mode or never has it: what holds for a prompt must not depend on a draw.

    `present`: the members so far. One that an earlier version let mix may keep both modes, so that it can go back.
    """
    table = tables.deployments
    query = sa.select(table.c.security_settings).where(
        table.c.client_id == context.client_id, table.c.id.in_([one["id"] for one in present])
    )
    modes = {is_hipaa(row) for row in wanted}
    kept = {is_hipaa(dict(row)) for row in connection.execute(query).mappings()}
    if len(modes) > max(1, len(kept)) or (kept and not modes <= kept):
        text = "the deployments of an endpoint are in hipaa mode all or none, for its whole life"
        raise DeploymentError(f"{text}: make another endpoint", param=param)


def _refuse_idle(status: DeploymentStatus, who: str, param: str) -> None:
    if status not in SERVING:
        raise DeploymentError(f"{who} is {status}: it cannot take traffic", param=param)


def own_endpoint(context: Context, endpoint_id: str, kind: str | None = None) -> Row:
    """The caller's endpoint. Raises `ResourceNotFound`, the same for a missing and for another's."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.endpoints, endpoint_id, client_id=context.client_id)
    return endpoint_in_force(context, row, kind)


def endpoint_in_force(context: Context, row: Row | None, kind: str | None = None) -> Row:
    """One of the caller's that was read, as its lease has it now. Raises `ResourceNotFound`."""
    if row is None or row["status"] == EndpointStatus.DELETED or kind not in (None, row["kind"]):
        raise ResourceNotFound("there is no such endpoint")
    return endpoint_records.in_force(row, context.now)


def _etag(row: Row) -> str:
    return f'"{row["version"]}"'


def _check_version(context: Context, row: Row) -> None:
    """`If-Match` stops the slower of two drivers."""
    message = f"the endpoint has changed: its version is {row['version']}"
    context.refuse_stale(_etag(row), message)


def _answer(context: Context, row: Row) -> CanaryEndpoint:
    context.headers["ETag"] = _etag(row)
    return _rendered(context, row)


def _plain_answer(context: Context, row: Row) -> Endpoint:
    context.headers["ETag"] = _etag(row)
    return _plain_rendered(context, row)


def _url(context: Context, row: Row) -> str:
    return f"{context.parts.public_url}/v1/endpoints/{row['id']}/generate"


def _plain_rendered(context: Context, row: Row) -> Endpoint:
    target = row["members"][0]["id"]
    return Endpoint.model_validate({**row, "deployment_id": target, "url": _url(context, row)})


def _rendered(context: Context, row: Row) -> CanaryEndpoint:
    lease: Mapping[str, Any] | None = None
    if row["lease_until"] is not None:
        lease = {
            "seconds": row["lease_seconds"],
            "expires_at": row["lease_until"],
            "fallback": row["lease_fallback"],
        }
    return CanaryEndpoint.model_validate(
        {**row, "deployments": row["members"], "url": _url(context, row), "lease": lease}
    )


@serves(contract.get_endpoint)
def get_endpoint(context: Context, endpoint_id: str) -> Endpoint | CanaryEndpoint:
    """Either kind, in its own form."""
    row = own_endpoint(context, endpoint_id)
    return _answer(context, row) if row["kind"] == CANARY else _plain_answer(context, row)


@serves(contract.get_canary_endpoint)
def get_canary_endpoint(context: Context, endpoint_id: str) -> CanaryEndpoint:
    """The record, with its version as `ETag`."""
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


@serves(contract.list_canary_endpoints)
def list_canary_endpoints(
    context: Context, limit: int = 20, offset: int = 0, name: str | None = None
) -> CanaryEndpointPage:
    """Newest first."""
    page = _page(context, CANARY, limit, offset, name)
    return CanaryEndpointPage.model_validate(
        {
            "canary_endpoints": [
                _rendered(context, endpoint_records.in_force(row, context.now)) for row in page.rows
            ],
            "pagination": page.pagination,
        }
    )


@serves(contract.list_endpoints)
def list_endpoints(
    context: Context, limit: int = 20, offset: int = 0, name: str | None = None
) -> EndpointPage:
    """Newest first."""
    page = _page(context, PLAIN, limit, offset, name)
    return EndpointPage.model_validate(
        {
            "endpoints": [_plain_rendered(context, row) for row in page.rows],
            "pagination": page.pagination,
        }
    )


def _page(context: Context, kind: str, limit: int, offset: int, name: str | None) -> rows.Page:
    listing = CANARY_ENDPOINTS if kind == CANARY else ENDPOINTS
    filters = [] if name is None else [tables.endpoints.c.name == name]
    with context.read() as connection:
        return rows.listed(
            connection, listing, context.client_id, filters, limit=limit, offset=offset
        )


@serves(contract.update_endpoint)
def update_endpoint(context: Context, endpoint_id: str, update: EndpointUpdate) -> Endpoint:
    """Rename it, or send all of its traffic to another deployment from the next request on."""
    sent = update.model_dump(exclude_unset=True)
    if not sent:
        raise InvalidRequestError("the update holds no field")
    for field, value in sent.items():
        if value is None:
            raise refused(field, "must not be null")
    connection = context.transaction
    row = own_endpoint(context, endpoint_id, PLAIN)
    if update.deployment_id is not None:
        _check_target(context, connection, update.deployment_id, row["members"])
    if update.name is not None and update.name != row["name"]:
        _check_name(context, connection, update.name)
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
    """From the next request on it is not there."""
    return _deleted(context, endpoint_id, PLAIN)


@serves(contract.delete_canary_endpoint)
def delete_canary_endpoint(context: Context, endpoint_id: str) -> EndpointDeleted:
    """A running lease ends with it: there is nothing left to revert."""
    return _deleted(context, endpoint_id, CANARY)


def _deleted(context: Context, endpoint_id: str, kind: str) -> EndpointDeleted:
    connection = context.transaction
    endpoint_records.revert_lapsed(connection, context.now)
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
    endpoint_records.revert_lapsed(connection, context.now)  # the version must say so first
    row = own_endpoint(context, endpoint_id, CANARY)
    _check_members(context, connection, update, row["members"])
    _check_version(context, row)
    members = _plain(update.deployments)
    endpoint_records.swap(connection, row, members, _lease(update.lease), context.now)
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


@serves(contract.renew_canary_lease)
def renew_canary_lease(context: Context, endpoint_id: str, renewal: LeaseRenewal) -> CanaryEndpoint:
    """Push the lease's end; 0 ends it and keeps the split. A renewal raises no version, an end does."""
    connection = context.transaction
    row = own_endpoint(context, endpoint_id, CANARY)
    if row["lease_until"] is None:
        raise InvalidRequestError("the endpoint has no running lease", status=409)
    _check_version(context, row)
    if renewal.seconds == 0:
        endpoint_records.swap(connection, row, row["members"], None, context.now)
    else:
        rows.change(
            connection,
            tables.endpoints,
            endpoint_id,
            row["updated_at"],
            lease_seconds=renewal.seconds,
            lease_until=context.now + timedelta(seconds=renewal.seconds),
        )
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))
