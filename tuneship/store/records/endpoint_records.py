"""Changes endpoint rows. The whole split is in one row, replaced in one transaction; each change raises `version`."""

import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import sqlalchemy as sa

from tuneship.contract.endpoints import EndpointStatus
from tuneship.store.database import rows
from tuneship.store.database.database import is_away
from tuneship.store.database.rows import fetch_all
from tuneship.store.database.tables import EndpointRow, endpoints
from tuneship.store.records.outbox import emit

logger = logging.getLogger(__name__)


def swap(
    connection: sa.Connection,
    row: EndpointRow,
    members: Sequence[dict[str, Any]],
    lease: dict[str, Any] | None,
    now: datetime,
    **more: Any,
) -> None:
    """Replace the split and the lease (`seconds`, `fallback`, `pausable`; None ends it), and set `more` columns as
    well. What a person had decided about the split before is lifted, unless `more` has it.
    """
    changes: dict[str, Any] = {"paused": None, "reverted": None, **more}
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
        pausable=bool(lease and lease["pausable"]),
        **changes,
    )


def revert(
    connection: sa.Connection,
    row: EndpointRow,
    now: datetime,
    reason: str,
    decided: dict[str, Any] | None = None,
) -> None:
    """End the lease of an endpoint and switch to its fallback. `decided`: the decision of the person who does so."""
    # Every lease has a fallback.
    fallback = cast("list[dict[str, Any]]", row["lease_fallback"])
    swap(connection, row, fallback, None, now, reverted=decided)
    more: dict[str, Any] = {"from": row["members"]}
    if decided:
        more |= {"why": decided["reason"], "ticket": decided["ticket"]}
    emit(
        connection,
        "canary_endpoint.reverted",
        row,
        now,
        version=row["version"] + 1,
        to=fallback,
        reason=reason,
        **more,
    )


def set_pause(
    connection: sa.Connection,
    row: EndpointRow,
    now: datetime,
    decided: dict[str, Any],
    *,
    is_paused: bool,
) -> None:
    """Hold the split, or lift that, as a person has decided."""
    # It is no change of the split, so version and time stay: the pipeline's condition still holds.
    paused = decided if is_paused else None
    rows.change(connection, endpoints, row["id"], row["updated_at"], paused=paused)
    kind = "canary_endpoint.paused" if is_paused else "canary_endpoint.resumed"
    why = {"reason": decided["reason"], "ticket": decided["ticket"]}
    emit(connection, kind, row, now, version=row["version"], **why)


def rename(connection: sa.Connection, row: EndpointRow, name: str, now: datetime) -> None:
    """Give an endpoint another name; its split and its status stay as they are."""
    rows.change(connection, endpoints, row["id"], now, name=name, version=row["version"] + 1)


def revert_lapsed(
    connection: sa.Connection, client_id: str, now: datetime, besides: Collection[str] = ()
) -> dict[str, Exception | None]:
    """Switch a client's endpoints with lapsed leases to their fallbacks, except for the ids in `besides`.

    Returns the ids of these endpoints, with the error of each that failed. A row that cannot be used is logged and left
    as it is, so that it does not hold up the traffic of other endpoints.
    """
    query = sa.select(endpoints).where(
        endpoints.c.client_id == client_id, is_lapsed(now), endpoints.c.id.not_in(besides)
    )
    found: list[EndpointRow] = fetch_all(connection, query)
    ended: dict[str, Exception | None] = {}
    for row in found:
        try:
            # A savepoint: a row that cannot be changed undoes nothing of the others.
            with connection.begin_nested():
                revert(connection, row, now, "lease_expired")
        except Exception as error:
            if is_away(error):
                raise
            logger.exception("an expired lease could not be ended: %s", row["id"])
            ended[row["id"]] = error
        else:
            ended[row["id"]] = None
    return ended


def lapsed(connection: sa.Connection, now: datetime) -> dict[str, str]:
    """The ids of endpoints whose lapsed lease is still in the row, each with its client."""
    found = connection.execute(
        sa.select(endpoints.c.id, endpoints.c.client_id).where(is_lapsed(now))
    )
    return {row.id: row.client_id for row in found}


def next_lapse(connection: sa.Connection, now: datetime) -> datetime | None:
    """When the next lease lapses that has not yet; None without any."""
    query = sa.select(sa.func.min(endpoints.c.lease_until)).where(~is_lapsed(now))
    return connection.scalar(query)


def is_lapsed(now: datetime) -> sa.ColumnElement[bool]:
    """Condition for endpoints whose lapsed lease is still in the row."""
    return endpoints.c.lease_until <= now


def in_force(row: EndpointRow, now: datetime) -> EndpointRow:
    """The endpoint as it routes at `now`: by its fallback once the lease has lapsed, even before that is stored."""
    if row["lease_until"] is None or row["lease_until"] > now:
        return row
    return {
        **row,
        "members": cast("list[dict[str, Any]]", row["lease_fallback"]),  # every lease has one
        "version": row["version"] + 1,
        "updated_at": row["lease_until"],
        "lease_seconds": None,
        "lease_until": None,
        "lease_fallback": None,
        "pausable": False,
        "paused": None,
    }


def endpoints_naming(
    connection: sa.Connection, client_id: str, deployment_id: str
) -> list[EndpointRow]:
    """The client's endpoints that name the deployment in their split or fallback, deleted ones excepted."""
    # The database searches the JSON text, since a client may have hundreds of endpoints, of which few match.
    named = [
        sa.cast(column, sa.Text).contains(deployment_id, autoescape=True)
        for column in (endpoints.c.members, endpoints.c.lease_fallback)
    ]
    query = sa.select(endpoints).where(
        endpoints.c.client_id == client_id,
        endpoints.c.status != EndpointStatus.DELETED,
        sa.or_(*named),
    )
    return fetch_all(connection, query)


def named(connection: sa.Connection, client_id: str, name: str) -> EndpointRow | None:
    """The client's endpoint with this name; a name belongs to one endpoint at a time."""
    is_live = endpoints.c.status != EndpointStatus.DELETED
    where = (endpoints.c.client_id == client_id, endpoints.c.name == name, is_live)
    found = rows.matching(connection, endpoints, *where)
    return found[0] if found else None


def active_of(connection: sa.Connection, client_id: str) -> list[EndpointRow]:
    """The client's endpoints that route requests, by name."""
    is_active = endpoints.c.status == EndpointStatus.ACTIVE
    found = rows.matching(connection, endpoints, endpoints.c.client_id == client_id, is_active)
    return sorted(found, key=lambda row: row["name"])


def endpoints_routing_to(
    connection: sa.Connection, client_id: str, deployment_id: str
) -> list[EndpointRow]:
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


def retire(
    connection: sa.Connection, row: EndpointRow, status: EndpointStatus, now: datetime
) -> None:
    """Stop routing: `deleted`, or `inactive` until the next valid update after a member was deleted by force."""
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
        pausable=False,
        paused=None,
    )


def remove_idle_member(
    connection: sa.Connection, client_id: str, deployment_id: str, now: datetime
) -> None:
    """Remove a deployment that gets 0 % of the traffic from every split and every fallback."""
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
