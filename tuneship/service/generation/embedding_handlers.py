"""Handlers of embeddings: by a deployment, or by the deployment that an endpoint's split draws."""

import time

from tuneship.contract import embeddings as contract
from tuneship.contract.embeddings import Embed, Embeddings
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.generation.drills import embedding_run
from tuneship.service.generation.embedding_run import numbers_of
from tuneship.service.generation.routing import RoutingTarget, cached_row, choose_by_split
from tuneship.store.database import tables


@serves(contract.embed)
async def embed(context: Context, deployment_id: str, request: Embed) -> bytes:
    """Embed with this deployment."""
    return await _embedded(context, RoutingTarget(deployment_id), request, time.perf_counter())


@serves(contract.embed_by_endpoint)
async def embed_by_endpoint(context: Context, endpoint_id: str, request: Embed) -> bytes:
    """Embed with the deployment that the split draws for this request."""
    started = time.perf_counter()
    endpoint = await cached_row(context, tables.endpoints, endpoint_id)
    return await _embedded(context, choose_by_split(context, endpoint), request, started)


async def _embedded(
    context: Context, target: RoutingTarget, request: Embed, started: float
) -> bytes:
    run = embedding_run(context, target, request, started)

    def as_json() -> bytes:
        numbers = [numbers_of(vector) for vector in run.vectors]
        reply = Embeddings(deployment_id=target.deployment_id, embeddings=numbers, usage=run.usage)
        return reply.model_dump_json().encode()

    return await run.answer_as(as_json)
