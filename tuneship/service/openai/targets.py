"""Finds who answers for the `model` of a request: a deployment, an endpoint by id or name, or a model's deployment."""

import re
from dataclasses import dataclass

import sqlalchemy as sa

from tuneship.contract.errors import ModelNotFound
from tuneship.contract.openai.ids import own_model_id
from tuneship.service.context.context import Context
from tuneship.service.generation.routing import RoutingTarget, cached, cached_row, choose_by_split
from tuneship.store import deployment_records, endpoint_records, tables
from tuneship.store.row_types import DeploymentRow, EndpointRow

DEPLOYMENT_ID = re.compile(r"dep_[0-9a-z]{20,32}")
ENDPOINT_ID = re.compile(r"c?ep_[0-9a-z]{20,32}")


@dataclass(frozen=True)
class _Answering:
    """An endpoint, or the deployments that serve a model, the one to ask first."""

    endpoint: EndpointRow | None
    deployments: list[str]


async def target_of(context: Context, model: str) -> RoutingTarget:
    """The deployment that shall answer. Raises `ModelNotFound` where nothing of the caller has this name."""
    if DEPLOYMENT_ID.fullmatch(model):
        return RoutingTarget(model)
    if ENDPOINT_ID.fullmatch(model):
        endpoint = await cached_row(context, tables.endpoints, model)
        return choose_by_split(context, endpoint)
    found = await cached(
        context, ("answers for", model), lambda connection: _find(connection, context, model)
    )
    if found is None:
        raise ModelNotFound(
            "The model does not exist, you do not have access to it, or no deployment serves it.",
            param="model",
        )
    if found.endpoint is not None:
        return choose_by_split(context, found.endpoint)
    return RoutingTarget(found.deployments[0])


def _find(connection: sa.Connection, context: Context, model: str) -> _Answering | None:
    # A name comes first: behind `gpt-4o-mini` stands what an endpoint's owner put there.
    endpoint = endpoint_records.named(connection, context.client_id, model)
    deployments: list[str] = []
    if endpoint is None:
        identifier = own_model_id(model, context.client_id)
        deployments = deployment_records.serving_ids_of_model(
            connection, context.client_id, identifier
        )
        if not deployments:
            return None
    return _Answering(endpoint, deployments)


async def deployment_of(context: Context, target: RoutingTarget) -> DeploymentRow | None:
    """The row of the deployment that shall answer."""
    return await cached_row(context, tables.deployments, target.deployment_id)
