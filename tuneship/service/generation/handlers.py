"""Handlers of generation: by a deployment, or by the deployment that an endpoint's split draws.

Next: `generation_run.py` (one generation from its routing to its record), `routing.py` (the draw).
"""

import time

from tuneship.contract import generation as contract
from tuneship.contract.generation import Generate, Generation
from tuneship.service.answers.streaming import Stream
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.generation.drills import generation_run
from tuneship.service.generation.routing import RoutingTarget, cached_row, choose_by_split
from tuneship.store.database import tables


@serves(contract.generate)
async def generate(context: Context, deployment_id: str, request: Generate) -> Generation | Stream:
    """Answer with this deployment."""
    run = generation_run(context, RoutingTarget(deployment_id), request, time.perf_counter())
    return await (run.stream() if request.stream else run.answer())


@serves(contract.generate_by_endpoint)
async def generate_by_endpoint(
    context: Context, endpoint_id: str, request: Generate
) -> Generation | Stream:
    """Answer with the deployment that the split draws for this request."""
    started = time.perf_counter()
    endpoint = await cached_row(context, tables.endpoints, endpoint_id)
    run = generation_run(context, choose_by_split(context, endpoint), request, started)
    return await (run.stream() if request.stream else run.answer())
