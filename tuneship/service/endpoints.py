"""What the canary-endpoint operations do: one atomic split, versions against a second driver, leases that revert."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract import endpoints as contract
from tuneship.contract.deployments import SERVING
from tuneship.contract.endpoints import (
    CanaryEndpoint,
    CanaryEndpointCreate,
    CanaryEndpointPage,
    CanaryEndpointUpdate,
    EndpointStatus,
    LeaseRenewal,
    LeaseRequest,
    Member,
)
from tuneship.contract.errors import DeploymentError, InvalidRequestError, ResourceNotFound
from tuneship.service.context import Context
from tuneship.service.serving_table import serves
from tuneship.store import endpoint_records, rows, tables
from tuneship.store.identifiers import new_id
from tuneship.store.rows import Row

CANARY = "canary"


@serves(contract.create_canary_endpoint)
def create_canary_endpoint(context: Context, endpoint: CanaryEndpointCreate) -> CanaryEndpoint:
    """Record the split, and the lease when one is asked for."""
    connection, table = context.transaction, tables.endpoints
    _check_members(context, connection, endpoint)
    if rows.count(
        connection,
        table,
        table.c.client_id == context.client_id,
        table.c.name == endpoint.name,
        table.c.status != EndpointStatus.DELETED,
    ):
        raise InvalidRequestError("the name is taken by another endpoint", param="name", status=409)
    values: dict[str, Any] = {
        "id": new_id("cep"),
        "client_id": context.client_id,
        "created_at": context.now,
        "updated_at": context.now,
        "tags": {},
        "kind": CANARY,
        "name": endpoint.name,
        "members": _plain(endpoint.deployments),
        "status": EndpointStatus.ACTIVE,
        "version": 0,
    }
    row = rows.insert(connection, table, values)
    endpoint_records.swap(connection, row, row["members"], _lease(endpoint.lease), context.now)
    return _answer(context, own_endpoint(context, row["id"], CANARY))


def _plain(members: Sequence[Member]) -> list[dict[str, Any]]:
    return [member.model_dump() for member in members]


def _lease(lease: LeaseRequest | None) -> dict[str, Any] | None:
    return None if lease is None else lease.model_dump()


def _check_members(
    context: Context, connection: sa.Connection, update: CanaryEndpointUpdate
) -> None:
    """Every member exists; whoever gets traffic, now or by the fallback, can serve it."""
    for member in (*update.deployments, *(update.lease.fallback if update.lease else ())):
        row = rows.fetch(connection, tables.deployments, member.id, client_id=context.client_id)
        if row is None:
            raise ResourceNotFound("there is no such deployment", param="deployments")
        if member.traffic_percentage > 0 and row["status"] not in SERVING:
            raise DeploymentError(
                f"the deployment {member.id} is {row['status']}: it cannot take traffic",
                param="deployments",
            )


def own_endpoint(context: Context, endpoint_id: str, kind: str | None = None) -> Row:
    """The caller's endpoint. Raises `ResourceNotFound`, the same for a missing and for another's."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.endpoints, endpoint_id, client_id=context.client_id)
    if row is None or row["status"] == EndpointStatus.DELETED or kind not in (None, row["kind"]):
        raise ResourceNotFound("there is no such endpoint")
    return endpoint_records.in_force(row, context.now)


def _answer(context: Context, row: Row) -> CanaryEndpoint:
    context.headers["ETag"] = f'"{row["version"]}"'
    return _rendered(context, row)


def _rendered(context: Context, row: Row) -> CanaryEndpoint:
    lease: Mapping[str, Any] | None = None
    if row["lease_until"] is not None:
        lease = {
            "seconds": row["lease_seconds"],
            "expires_at": row["lease_until"],
            "fallback": row["lease_fallback"],
        }
    url = f"{context.parts.public_url}/v1/endpoints/{row['id']}/generate"
    return CanaryEndpoint.model_validate(
        {**row, "deployments": row["members"], "url": url, "lease": lease}
    )


@serves(contract.get_canary_endpoint)
def get_canary_endpoint(context: Context, endpoint_id: str) -> CanaryEndpoint:
    """The record, with its version as `ETag`."""
    return _answer(context, own_endpoint(context, endpoint_id, CANARY))


@serves(contract.list_canary_endpoints)
def list_canary_endpoints(
    context: Context, limit: int = 20, offset: int = 0, name: str | None = None
) -> CanaryEndpointPage:
    """Newest first."""
    table = tables.endpoints
    where = [
        table.c.client_id == context.client_id,
        table.c.kind == CANARY,
        table.c.status != EndpointStatus.DELETED,
    ]
    if name is not None:
        where.append(table.c.name == name)
    with context.read() as connection:
        page = rows.page(connection, table, where, limit=limit, offset=offset)
    return CanaryEndpointPage.model_validate(
        {
            "canary_endpoints": [
                _rendered(context, endpoint_records.in_force(row, context.now)) for row in page.rows
            ],
            "pagination": page.pagination,
        }
    )


@serves(contract.update_canary_endpoint)
def update_canary_endpoint(
    context: Context, endpoint_id: str, update: CanaryEndpointUpdate
) -> CanaryEndpoint:
    """Swap the whole split; a refusal leaves the routing as it was."""
    connection = context.transaction
    endpoint_records.revert_lapsed(connection, context.now)  # the version must say so first
    row = own_endpoint(context, endpoint_id, CANARY)
    _check_members(context, connection, update)
    if context.if_match not in (None, "*", f'"{row["version"]}"'):
        raise InvalidRequestError(
            f"the endpoint has changed: its version is {row['version']}", status=412
        )
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
