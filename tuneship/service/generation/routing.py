"""Chooses the deployment that answers a generation, and reads rows that rarely change from the read cache."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.errors import InvalidRequestError
from tuneship.service.context.context import Context
from tuneship.service.endpoints.lookup import endpoint_in_force
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import EndpointRow
from tuneship.traffic.split import draw_of_key, split_of

R = TypeVar("R")

LONGEST_ROUTING_KEY_BYTES = 256


@dataclass(frozen=True)
class RoutingTarget:
    """The deployment that is to answer; the endpoint is empty when the deployment was called directly."""

    deployment_id: str
    endpoint_id: str = ""
    # The hash of the routing key, where a split of several deployments keeps it at this one.
    sticky_key: int | None = None
    # How many large keys such a split draws by request.
    spread_keys: int = 0


def choose_by_split(context: Context, row: EndpointRow | None) -> RoutingTarget:
    """Draw a deployment from an endpoint's split, by the routing key where the request has one that is not large.

    Raises `ResourceNotFound` where there is no endpoint, `InvalidRequestError` for an inactive one and a bad key.
    """
    endpoint = endpoint_in_force(context, row)
    if endpoint["status"] != EndpointStatus.ACTIVE:
        raise InvalidRequestError("the endpoint is inactive", status=409)
    key = context.routing_key
    if key is not None and not 1 <= len(key.encode()) <= LONGEST_ROUTING_KEY_BYTES:
        raise InvalidRequestError("X-Routing-Key must have 1 to 256 bytes")
    parts, identifier = context.parts, endpoint["id"]
    split = split_of(endpoint["members"])
    number = None if key is None else parts.recorder.number_of(f"routing key {key}")
    large = parts.large_keys.count(identifier, number, context.now.timestamp())
    spread = len(large) if split.is_divided and endpoint["large_keys"] != "keep" else 0
    if key is None or (spread and number in large):
        return RoutingTarget(split.choose(parts.draw()), identifier, spread_keys=spread)
    chosen = split.choose(draw_of_key(identifier, key, endpoint["rollout_id"]))
    return RoutingTarget(chosen, identifier, number if split.is_divided else None, spread)


async def cached(context: Context, name: tuple[str, str], read: Callable[[sa.Connection], R]) -> R:
    """The value that `read` returns from the database, from the cache while nothing was written since."""
    cache, key = context.parts.database.cache, (context.client_id, *name)
    value = cache.find(key)
    if value is not None:
        return value

    def read_from_database() -> R:
        with context.read() as connection:
            return read(connection)

    return await asyncio.to_thread(cache.read, key, read_from_database)


async def cached_row(
    context: Context, table: "tables.TypedTable[rows.R]", identifier: str
) -> "rows.R | None":
    """The caller's row with this id; None for a missing one and for another tenant's."""
    return await cached(
        context,
        (table.name, identifier),
        lambda connection: rows.fetch(connection, table, identifier, client_id=context.client_id),
    )
