"""What generating does: pick the deployment, render, run, cut and answer. A caller who hangs up cancels the run.

Next: `accounting.py` records how it ended, `text_stream.py` tells the text while it is written.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from tuneship.contract import generation as contract
from tuneship.contract.dataset_lines import instruction_messages
from tuneship.contract.deployments import GONE, SERVING, DeploymentStatus
from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.errors import (
    DeploymentError,
    InternalError,
    InvalidRequestError,
    ResourceNotFound,
    ValidationRefused,
)
from tuneship.contract.generation import Generate, Generation, Usage
from tuneship.runtime.replica_protocol import NoReplica
from tuneship.service.common.fault_injection import Faults, drawn, faults_of, shortened
from tuneship.service.common.in_flight import InFlightGeneration
from tuneship.service.common.refusals import refused
from tuneship.service.common.streaming import Stream
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.deployments.handlers import shown_deployment
from tuneship.service.endpoints.handlers import endpoint_in_force
from tuneship.service.generation.accounting import Routed, Written, recorded
from tuneship.service.generation.completion_text import Completion
from tuneship.service.generation.prompts import prompt_tokens
from tuneship.service.generation.retry import with_second_try
from tuneship.service.generation.text_stream import Tell, streamed
from tuneship.service.models.handlers import served_model
from tuneship.service.models.safeguards import SafeguardLost, check_served, is_within_reach
from tuneship.serving.replica_client import (
    GenerateRequest,
    ReplicaLost,
    RequestTooLarge,
    ServingError,
)
from tuneship.store import job_records, tables
from tuneship.store import queries as rows
from tuneship.store.identifiers import new_id
from tuneship.store.queries import Row
from tuneship.traffic.split import draw_of_key, split_of

R = TypeVar("R")
Reading = Callable[[sa.Connection], R]

LONGEST_ROUTING_KEY = 256
DEFAULT_MAX_TOKENS = 256
BEING_DELETED = "the deployment is being deleted"
# Characters beyond which counting tokens would hold up the event loop: a thousand take up to two
# milliseconds.
LONG_PROMPT = 1_000
# A turn of a conversation takes as long to render as so many characters take to count.
TURN_CHARACTERS = 50


@dataclass(frozen=True)
class RoutingTarget:
    """Who shall answer; the endpoint is empty when the deployment was called directly."""

    deployment_id: str
    endpoint_id: str = ""


@serves(contract.generate)
async def generate(context: Context, deployment_id: str, request: Generate) -> Generation | Stream:
    """Answer with this deployment."""
    return await _answer(context, RoutingTarget(deployment_id), request, time.perf_counter())


@serves(contract.generate_by_endpoint)
async def generate_by_endpoint(
    context: Context, endpoint_id: str, request: Generate
) -> Generation | Stream:
    """Answer with the deployment that the split draws for this request."""
    started = time.perf_counter()
    target = _by_split(context, await _row(context, tables.endpoints, endpoint_id))
    return await _answer(context, target, request, started)


async def _at_hand(context: Context, name: tuple[str, str], read: Reading[R]) -> R:
    """What `read` finds in the database; nearly always nothing was written since it was read last."""
    cache, key = context.parts.database.cache, (context.client_id, *name)

    def reading() -> R:
        with context.read() as connection:
            return read(connection)

    found = cache.find(key)
    return await asyncio.to_thread(cache.read, key, reading) if found is None else found


async def _row(context: Context, table: sa.Table, identifier: str) -> Row | None:
    read = partial(rows.fetch, table=table, identifier=identifier, client_id=context.client_id)
    return await _at_hand(context, (table.name, identifier), read)


async def _routed(context: Context, target: RoutingTarget) -> Routed:
    row = await _row(context, tables.deployments, target.deployment_id)
    await _touch_job(context, row)
    deployment = shown_deployment(context, row)
    if not is_within_reach(context, deployment):
        raise ResourceNotFound(
            f"there is no such {'endpoint' if target.endpoint_id else 'deployment'}"
        )
    model = deployment["model_name"]
    read = partial(served_model, parts=context.parts, client_id=context.client_id, identifier=model)
    return Routed(deployment, await _at_hand(context, ("model", model), read), target.endpoint_id)


async def _touch_job(context: Context, row: Row | None) -> None:
    """`audit_logging` of a job holds for what its model answers."""
    if row is None:
        return
    names = [row["model_name"]]
    read = partial(job_records.safeguards_behind, client_id=context.client_id, model_names=names)
    for job in await _at_hand(context, ("safeguards behind", *names), read):
        context.trail.touch(job)


def _by_split(context: Context, row: Row | None) -> RoutingTarget:
    endpoint = endpoint_in_force(context, row)
    if endpoint["status"] != EndpointStatus.ACTIVE:
        raise InvalidRequestError("the endpoint is inactive", status=409)
    key = context.routing_key
    if key is not None and not 1 <= len(key.encode()) <= LONGEST_ROUTING_KEY:
        raise InvalidRequestError("X-Routing-Key must have 1 to 256 bytes")
    draw = context.parts.draw() if key is None else draw_of_key(endpoint["id"], key)
    return RoutingTarget(split_of(endpoint["members"]).choose(draw), endpoint["id"])


async def _answer(
    context: Context, target: RoutingTarget, request: Generate, started: float
) -> Generation | Stream:
    """Whole, or as a stream of what is written."""
    whole = partial(_whole, context, target, request, started)
    if not request.stream:
        generation = await whole(_unheard)
        context.trail.count(generation.usage)
        return generation
    return await streamed(partial(_to_its_end, context, whole), context.request_id)


async def _to_its_end(
    context: Context, whole: Callable[[Tell], Awaitable[Generation]], tell: Tell
) -> Generation:
    """The boundary writes the start of a stream into the audit chain, maybe after its end: only this row counts."""
    generation = await whole(tell)
    if context.trail.is_required:
        ended = replace(context, trail=replace(context.trail))
        ended.trail.count(generation.usage)
        await asyncio.to_thread(ended.commit_audit_entry, 200)
    return generation


def _unheard(_text: str) -> None:
    """The caller waits for the whole answer."""


async def _whole(
    context: Context, target: RoutingTarget, request: Generate, started: float, tell: Tell
) -> Generation:
    """Run it where the target's record says, unless it is gone."""
    with context.parts.in_flight.track(target.deployment_id) as visit:
        routed = await _routed(context, target)
        visit.accepted, visit.endpoint_id = started, routed.endpoint_id
        write = partial(_written, context, routed, request, visit, tell)
        written = await recorded(context, routed, write, started)
    return Generation(
        id=new_id("gen"),
        deployment_id=routed.deployment["id"],
        prompt=request.prompt,
        completion=written.completion,
        finish_reason=written.finish_reason,
        usage=Usage(
            prompt_tokens=written.prompt_tokens,
            completion_tokens=written.completion_tokens,
            total_tokens=written.prompt_tokens + written.completion_tokens,
        ),
    )


async def _written(
    context: Context, routed: Routed, request: Generate, visit: InFlightGeneration, tell: Tell
) -> Written:
    _check_status(routed.deployment)
    _check_safeguards(context, routed)
    settings = context.parts.settings
    faults = faults_of(routed.deployment["tags"], allowed=settings.allow_fault_injection)
    if _characters(request) > LONG_PROMPT:
        texts = context.parts.threads.texts
        prepared = await texts.run(context.client_id, _prepared, routed, request)
    else:
        prepared = _prepared(routed, request)
    _check_drill(context, routed, request, len(prepared.tokens), faults.refuse)
    is_emptied, is_cut = drawn(faults.empty_rate), drawn(faults.short)
    told = _unheard if is_emptied or is_cut else tell
    with _failures_told(visit):
        async with asyncio.timeout(settings.generate_timeout_s) as visit.limit:
            await _break(faults)
            run = partial(_run, context, routed, prepared, request, visit)
            written = await with_second_try(run, told, request.stream)
    if is_emptied:
        return replace(written, completion="")
    return _cut(written, tell) if is_cut else written


@contextmanager
def _failures_told(visit: InFlightGeneration) -> Generator[None]:
    """Raises the contract's errors for those of the replicas and of the clock."""
    try:
        yield
    except TimeoutError:
        if visit.is_ended:
            raise DeploymentError(BEING_DELETED) from None
        raise InternalError("the generation took too long") from None
    except NoReplica:
        raise InternalError(
            "no replica of the model can answer now", status=503, retry_after=1
        ) from None
    except ReplicaLost:
        text = "the model's process ended during the generation"
        raise InternalError(text, status=503, retry_after=1) from None
    except RequestTooLarge as refusal:
        raise refused("max_tokens", f"asks for too much: {refusal}", "out_of_range") from None
    except ServingError:
        raise InternalError("the model could not generate") from None
    finally:
        visit.limit = None


def _characters(request: Generate) -> int:
    turns = request.messages or ()
    return len(request.prompt or "") + sum(len(turn.content) + TURN_CHARACTERS for turn in turns)


def _check_drill(
    context: Context, routed: Routed, request: Generate, length: int, share: float
) -> None:
    """Refuse the longest prompts, in the words of `_prepared`."""
    lengths = context.parts.prompt_lengths
    if share and lengths.is_among_longest(routed.deployment["id"], length, share):
        raise _too_long(_param(request), str(length), length - 1)


async def _break(faults: Faults) -> None:
    await asyncio.sleep(faults.delay_ms / 1000)
    if drawn(faults.error_rate):
        raise InternalError("an injected fault of this deployment")
    if drawn(faults.hang):
        await asyncio.get_running_loop().create_future()


def _cut(written: Written, tell: Tell) -> Written:
    short, share = shortened(written.completion)
    tell(short)
    tokens = max(1, round(share * written.completion_tokens))
    return replace(written, completion=short, completion_tokens=tokens)


def _check_status(deployment: Row) -> None:
    status = DeploymentStatus(deployment["status"])
    if status in SERVING:
        return
    if status is DeploymentStatus.CREATING:
        raise DeploymentError("the deployment is still being created", status=503, retry_after=1)
    raise DeploymentError(BEING_DELETED if status in GONE else "the deployment has failed")


def _check_safeguards(context: Context, routed: Routed) -> None:
    """After a restart requests come before the keeper has judged every deployment, and each of them loads its model."""
    try:
        check_served(context.parts, routed.deployment["security_settings"], routed.served)
    except SafeguardLost as error:
        raise DeploymentError(f"the model cannot be served: {error}") from error


def _prepared(routed: Routed, request: Generate) -> GenerateRequest:
    """Render with the model's own template, count, and fill in the deployment's defaults."""
    generation, served = routed.deployment["generation"], routed.served
    messages: list[Any] = [turn.model_dump() for turn in request.messages or ()]
    if request.prompt is not None:
        messages = list(instruction_messages(request.prompt))
    param = _param(request)
    context_length = generation["context_length"]
    said = sum(len(message["content"]) for message in messages)
    if served.base.is_surely_longer(said, context_length):
        raise _too_long(param, f"over {context_length}", context_length)
    tokens = prompt_tokens(served.base, served.template, messages, param)
    room = context_length - len(tokens)
    if room < 1:
        raise _too_long(param, str(len(tokens)), context_length)
    most = generation["max_output_tokens"]
    if request.max_tokens is not None and request.max_tokens > most:
        raise refused("max_tokens", f"must be at most {most}", "out_of_range")
    wanted = min(DEFAULT_MAX_TOKENS, most) if request.max_tokens is None else request.max_tokens
    temperature, top_p = request.temperature, request.top_p
    return GenerateRequest(
        adapter=served.adapter.name if served.adapter else None,
        tokens=tuple(tokens),
        max_tokens=min(wanted, room),
        temperature=generation["default_temperature"] if temperature is None else temperature,
        top_p=generation["default_top_p"] if top_p is None else top_p,
        seed=request.seed,
        stop_tokens=served.base.stop_tokens,
        queue=routed.deployment["id"],
        owner=hashlib.sha256(routed.deployment["client_id"].encode()).hexdigest()[:16],
    )


def _param(request: Generate) -> str:
    return "prompt" if request.prompt is not None else "messages"


def _too_long(param: str, tokens: str, context_length: int) -> ValidationRefused:
    message = f"has {tokens} tokens, the context holds {context_length}"
    return refused(param, message, "out_of_range")


async def _run(
    context: Context,
    routed: Routed,
    prepared: GenerateRequest,
    request: Generate,
    visit: InFlightGeneration,
    tell: Tell,
) -> Written:
    """Collect tokens; text that is looked at while it grows is unfolded token by token."""
    group = context.parts.replicas.of(routed.served.base.path)
    tokenizer: Any = routed.served.base.tokenizer
    completion = Completion(tokenizer.decode, request.stop)
    is_watched = bool(request.stop) or request.stream
    tokens: list[int] = []
    visit.queued(context.now)
    async with await group.generate(routed.served.adapter, prepared) as generation:
        async for chunk in generation:
            visit.started()
            if not is_watched:
                tokens = chunk + await generation.rest()
            elif _is_stopped(completion, chunk, tell):
                break
        reason = str(generation.finish_reason)
    if not is_watched:
        return Written(tokenizer.decode(tokens), reason, len(prepared.tokens), len(tokens))
    if rest := completion.finish():
        tell(rest)
    reason = "stop" if completion.is_stopped else reason
    return Written(completion.text, reason, len(prepared.tokens), completion.tokens)


def _is_stopped(completion: Completion, chunk: list[int], tell: Tell) -> bool:
    """Take tokens up to the one that completes a stop text."""
    for token in chunk:
        if text := completion.take(token):
            tell(text)
        if completion.is_stopped:
            return True
    return False
