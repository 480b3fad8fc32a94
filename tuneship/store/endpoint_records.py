"""Endpoint rows: the split is one row, swapped in one transaction; every change raises its `version`."""

import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tuneship.contract.endpoints import EndpointStatus
from tuneship.store import queries as rows
from tuneship.store.database import is_away
from tuneship.store.outbox import emit
from tuneship.store.queries import Row
from tuneship.store.tables import endpoints

logger = logging.getLogger(__name__)


def swap(
    connection: sa.Connection,
    row: Row,
    members: Sequence[dict[str, Any]],
    lease: dict[str, Any] | None,
    now: datetime,
    **more: Any,
) -> None:
    """Set the whole split and the lease (`seconds`, `fallback`; None ends it), and `more` columns with them."""
    rows.change(
        connection,
        endpoints,
        row["id"],
        now,
        members=list(members),
        status=EndpointStatus.ACTIVE,
        version=row["version"] + 1,
        lease_seconds=lease["seconds"] if lease else None,
        lease_until=now + timedelta(seconds=lease["seconds"]) if lease else None,
        lease_fallback=lease["fallback"] if lease else None,
        **more,
    )


def rename(connection: sa.Connection, row: Row, name: str, now: datetime) -> None:
    """Where it routes to and whether it is active stay as they are."""
    rows.change(connection, endpoints, row["id"], now, name=name, version=row["version"] + 1)


def revert_lapsed(
    connection: sa.Connection, now: datetime, besides: Collection[str] = ()
) -> dict[str, Exception | None]:
    """Return every endpoint whose lease has lapsed to its fallback; answers their ids, and for which it failed.

    A row that cannot be used is logged and left as it is: it must not keep the traffic of others. `besides`: not these.
    """
    lapsed = connection.execute(
        sa.select(endpoints).where(is_lapsed(now), endpoints.c.id.not_in(besides))
    ).mappings()
    ended: dict[str, Exception | None] = {}
    for row in map(dict, list(lapsed)):
        try:
            with connection.begin_nested():
                _revert(connection, row, now)
        except Exception as error:
            if is_away(error):
                raise
            logger.exception("a lapsed lease could not be ended: %s", row["id"])
            ended[row["id"]] = error
        else:
            ended[row["id"]] = None
    return ended


def is_lapsed(now: datetime) -> sa.ColumnElement[bool]:
    """Which endpoints have a lease that has lapsed and is not ended in the row yet."""
    return endpoints.c.lease_until <= now


def _revert(connection: sa.Connection, row: Row, now: datetime) -> None:
    swap(connection, row, row["lease_fallback"], None, now)
    emit(
        connection,
        "canary_endpoint.reverted",
        row,
        now,
        version=row["version"] + 1,
        to=row["lease_fallback"],
        reason="lease_expired",
        **{"from": row["members"]},
    )


def in_force(row: Row, now: datetime) -> Row:
    """The endpoint as it stands: the fallback from the very moment at which the lease lapses, stored or not yet."""
    if row["lease_until"] is None or row["lease_until"] > now:
        return row
    return {
        **row,
        "members": row["lease_fallback"],
        "version": row["version"] + 1,
        "updated_at": row["lease_until"],
        "lease_seconds": None,
        "lease_until": None,
        "lease_fallback": None,
    }


def endpoints_naming(connection: sa.Connection, client_id: str, deployment_id: str) -> list[Row]:
    """The client's endpoints that name the deployment anywhere: few, whereas it may have hundreds."""
    named = [
        sa.cast(column, sa.Text).contains(deployment_id, autoescape=True)
        for column in (endpoints.c.members, endpoints.c.lease_fallback)
    ]
    query = sa.select(endpoints).where(
        endpoints.c.client_id == client_id,
        endpoints.c.status != EndpointStatus.DELETED,
        sa.or_(*named),
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def endpoints_routing_to(
    connection: sa.Connection, client_id: str, deployment_id: str
) -> list[Row]:
    """Active endpoints that send the deployment traffic, or would when their lease lapses."""
    return [
        row
        for row in endpoints_naming(connection, client_id, deployment_id)
        if row["status"] == EndpointStatus.ACTIVE
        and any(
            member["id"] == deployment_id and member["traffic_percentage"] > 0
            for member in (*row["members"], *(row["lease_fallback"] or ()))
        )
    ]


def retire(connection: sa.Connection, row: Row, status: EndpointStatus, now: datetime) -> None:
    """It routes no more: `deleted`, or `inactive` (a forced delete took a member away) until its next valid update."""
    rows.change(
        connection,
        endpoints,
        row["id"],
        now,
        status=status,
        version=row["version"] + 1,
        lease_seconds=None,
        lease_until=None,
        lease_fallback=None,
    )


def remove_idle_member(
    connection: sa.Connection, client_id: str, deployment_id: str, now: datetime
) -> None:
    """Take a deployment at 0 % out of every set and every fallback."""
    for row in endpoints_naming(connection, client_id, deployment_id):
        kept = _without(deployment_id, row["members"])
        fallback = row["lease_fallback"] and _without(deployment_id, row["lease_fallback"])
        if (kept, fallback) != (row["members"], row["lease_fallback"]):
            rows.change(
                connection,
                endpoints,
                row["id"],
                now,
                members=kept,
                lease_fallback=fallback,
                version=row["version"] + 1,
            )


def _without(deployment_id: str, members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        member
        for member in members
        if member["id"] != deployment_id or member["traffic_percentage"] > 0
    ]
