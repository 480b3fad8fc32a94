"""Finds who answers for the `model` of a request: a deployment, an endpoint by id or name, or a model's deployment."""

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.errors import ModelNotFound
from tuneship.contract.openai.ids import own_model_id
from tuneship.service.context.context import Context
from tuneship.service.deployments.implicit import make_implicit, wait_until_made
from tuneship.service.endpoints.lookup import endpoint_in_force
from tuneship.service.generation.routing import RoutingTarget, cached, cached_row, choose_by_split
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import DeploymentRow, EndpointRow
from tuneship.store.records import deployment_records, endpoint_records

DEPLOYMENT_ID = re.compile(r"dep_[0-9a-z]{20,32}")
MISSING = "The model does not exist or you do not have access to it"
ENDPOINT_ID = re.compile(r"c?ep_[0-9a-z]{20,32}")


@dataclass(frozen=True)
class _Answering:
    """An endpoint, or the deployments that serve a model, the one to ask first."""

    endpoint: EndpointRow | None
    deployments: list[str]
    # The first deployment is no longer being created.
    is_ready: bool


@dataclass(frozen=True)
class Answerer:
    """The deployment that is to answer a request."""

    target: RoutingTarget
    # None where it is gone, or not the caller's: the run refuses the request.
    row: DeploymentRow | None

    @property
    def model(self) -> str:
        """The model that answers."""
        return "" if self.row is None else self.row["model_name"]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The deployment's defaults and limits of generations."""
        return {} if self.row is None else self.row["generation"]


async def answerer_of(context: Context, model: str, person: str | None) -> Answerer:
    """Find what answers; the requests of one person go to one member of a canary. Raises `ModelNotFound`."""
    if context.routing_key is None and person is not None:
        context.routing_key = hashlib.sha256(person.encode()).hexdigest()
    target = await _target_of(context, model)
    row = await cached_row(context, tables.deployments, target.deployment_id)
    answerer = Answerer(target, row)
    context.model = answerer.model
    return answerer


async def _target_of(context: Context, model: str) -> RoutingTarget:
    """The deployment that is to answer. Raises `ModelNotFound` where nothing of the caller has this name."""
    if DEPLOYMENT_ID.fullmatch(model):
        return RoutingTarget(model)
    if ENDPOINT_ID.fullmatch(model):
        endpoint = await cached_row(context, tables.endpoints, model)
        return choose_by_split(context, endpoint)
    found = await cached(
        context, ("answers for", model), lambda connection: _find(connection, context, model)
    )
    if found is not None and found.endpoint is not None:
        return choose_by_split(context, found.endpoint)
    if found is None:
        deployment = await asyncio.to_thread(_implicit, context, model)
    elif found.is_ready:
        return RoutingTarget(found.deployments[0])
    else:
        deployment = found.deployments[0]
    await wait_until_made(context, deployment)
    return RoutingTarget(deployment)


def lasting_deployment(context: Context, model: str) -> str:
    """The deployment that a run asks from its first row to its last; of an endpoint, the one with most of its traffic.

    Raises `ModelNotFound` and `ResourceNotFound`, and what `make_implicit` raises.
    """
    if DEPLOYMENT_ID.fullmatch(model):
        return model
    with context.read() as connection:
        if ENDPOINT_ID.fullmatch(model):
            row = rows.fetch(connection, tables.endpoints, model, client_id=context.client_id)
            found = _Answering(endpoint_in_force(context, row), [], is_ready=True)
        else:
            found = _find(connection, context, model)
    if found is None:
        return _implicit(context, model)
    if found.endpoint is None:
        return found.deployments[0]
    members = endpoint_in_force(context, found.endpoint)["members"]
    return max(members, key=lambda one: one["traffic_percentage"])["id"]


def _implicit(context: Context, model: str) -> str:
    if context.parts.settings.openai_serve == "never":
        raise ModelNotFound(f"{MISSING}, or no deployment serves it", param="model")
    try:
        return make_implicit(context, own_model_id(model, context.client_id))
    except ModelNotFound:
        raise ModelNotFound(MISSING, param="model") from None


def _find(connection: sa.Connection, context: Context, model: str) -> _Answering | None:
    # A name comes first: behind `gpt-4o-mini` stands what an endpoint's owner put there.
    endpoint = endpoint_records.named(connection, context.client_id, model)
    if endpoint is not None:
        return _Answering(endpoint, [], is_ready=True)
    identifier = own_model_id(model, context.client_id)
    found = deployment_records.serving_of_model(connection, context.client_id, identifier)
    if not found:
        return None
    is_ready = found[0]["status"] != DeploymentStatus.CREATING
    return _Answering(None, [row["id"] for row in found], is_ready)
