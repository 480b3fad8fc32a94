"""Two tenants that own a resource of each kind, made by all declared create operations; requests come from Alice."""

from dataclasses import dataclass, replace
from typing import Any

import httpx
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tests.support.service.whole_api import CREATING, Own, options_of
from tests.support.service.world import World
from tuneship.contract.declaring.operation import Operation
from tuneship.store.database import tables


@dataclass(frozen=True)
class Tenants:
    """Two tenants, with the ids of their resources and the objects that valid request bodies refer to.

    `own` and `theirs`: ids of Alice and Bob by kind (`ft`, `ds`, `dep`, `ep`, `cep`, `wh`, `evt`, `model`).
    """

    world: World
    alice: Own
    bob: Own
    own: dict[str, str]
    theirs: dict[str, str]

    def ask(self, operation: Operation[..., Any], path: str, **options: Any) -> httpx.Response:
        return self.world.service.call(operation.method, path, "alice", **options)


def two_tenants(world: World) -> Tenants:
    ids, service = world.ids, world.service
    alice = Own(ids["ds_own"], service.dataset(), ids["dep_own"], _model_of(service, "alice"))
    bob = Own(
        ids["ds_of_other_tenant"],
        service.dataset("bob"),
        ids["dep_of_other_tenant"],
        ids["model_of_other_tenant"],
    )
    own, theirs = (
        _one_of_each(service, client, has) for client, has in (("alice", alice), ("bob", bob))
    )
    return Tenants(world, replace(alice, name="again"), replace(bob, name="again"), own, theirs)


def _one(service: Service, column: "sa.Column[Any]", client: str) -> str:
    query = sa.select(column).where(column.table.c.client_id == client).limit(1)
    with service.database.read() as connection:
        return connection.scalars(query).one()


def _model_of(service: Service, client: str) -> str:
    return _one(service, tables.models.c.id, client)


def _one_of_each(service: Service, client: str, has: Own) -> dict[str, str]:
    made = {"model": has.model, "evt": _one(service, tables.events.c.id, client)}
    for operation in CREATING:
        options = options_of(operation, has)
        answer = service.call(operation.method, operation.path, client, **options)
        assert answer.status_code == 201, f"{operation.name}: {answer.text}"
        made[answer.json()["id"].partition("_")[0]] = answer.json()["id"]
    return made
