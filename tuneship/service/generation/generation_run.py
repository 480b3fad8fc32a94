"""One generation, from the choice of its deployment's model to the recorded answer, whole or streamed.

A caller who disconnects cancels it. Next: `prompts.py` (the request to the replica), `accounting.py` (how it ended),
`text_stream.py` (the text while it is generated).
"""

import asyncio
from dataclasses import replace
from typing import Any

from tuneship.contract.deployments import GONE, SERVING, DeploymentStatus
from tuneship.contract.errors import ApiError, DeploymentError, InternalError, ResourceNotFound
from tuneship.contract.generation import Generate, Generation, Usage
from tuneship.runtime.replica_protocol import NoReplica
from tuneship.service.common.fault_injection import Faults, drawn, faults_of, shortened
from tuneship.service.common.in_flight import InFlightGeneration
from tuneship.service.common.refusals import refused
from tuneship.service.common.streaming import Stream
from tuneship.service.context.context import Context
from tuneship.service.deployments.handlers import shown_deployment
from tuneship.service.generation.accounting import GeneratedAnswer, GenerationAccount
from tuneship.service.generation.completion_text import Completion
from tuneship.service.generation.prompts import (
    PromptTooLong,
    is_long_prompt,
    prompt_param,
    replica_request,
)
from tuneship.service.generation.routing import RoutingTarget, cached, cached_row
from tuneship.service.generation.span import note_answer, note_request
from tuneship.service.generation.text_stream import TextStream
from tuneship.service.models.handlers import ServedModel, served_model
from tuneship.service.models.safeguards import SafeguardLost, check_served, is_within_reach
from tuneship.serving.replica_client import (
    GenerateRequest,
    ReplicaLost,
    RequestTooLarge,
    ServingError,
)
from tuneship.store import job_records, tables
from tuneship.store.identifiers import new_id
from tuneship.store.queries import Row

BEING_DELETED = "the deployment is being deleted"


class GenerationRun:
    """One request for a completion. Its methods stand in the order in which they run."""

    _deployment: Row
    _served: ServedModel
    _faults: Faults
    _in_flight: InFlightGeneration

    def __init__(
        self, context: Context, target: RoutingTarget, request: Generate, started: float
    ) -> None:
        """Begin with nothing but the request; `started` is when it came, by `time.perf_counter`."""
        self._context = context
        self._parts = context.parts
        self._target = target
        self._request = request
        self._started = started
        self._text: TextStream | None = None
        self._has_text = False

    async def stream(self) -> Stream:
        """Run in a task of its own, and return when the first text is there."""
        self._text = TextStream(self._context.request_id)
        return await self._text.open(self.answer())

    async def answer(self) -> Generation:
        """Run from the routing to the record. Raises the contract's errors."""
        context, target = self._context, self._target
        with self._parts.in_flight.track(target.deployment_id) as self._in_flight:
            await self._route()
            account = GenerationAccount(
                context, target.deployment_id, target.endpoint_id, self._started
            )
            context.headers["X-Deployment-ID"] = target.deployment_id
            try:
                self._check_can_serve()
                written = await self._run(await self._render())
            except asyncio.CancelledError:
                account.cancelled()
                raise
            except Exception as error:
                account.failed(error)
                raise
            account.succeeded(written, self._in_flight.first_token)
            note_answer(context.span, written, self._started, self._in_flight.first_token)

        usage = Usage(
            prompt_tokens=written.prompt_tokens,
            completion_tokens=written.completion_tokens,
            total_tokens=written.prompt_tokens + written.completion_tokens,
        )
        await self._audit(usage)
        return Generation(
            id=new_id("gen"),
            deployment_id=target.deployment_id,
            prompt=self._request.prompt,
            completion=written.completion,
            finish_reason=written.finish_reason,
            usage=usage,
        )

    async def _route(self) -> None:
        """Read the deployment and its model. Raises `ResourceNotFound` for what this caller may not use."""
        context, target = self._context, self._target
        row = await cached_row(context, tables.deployments, target.deployment_id)
        if row is not None:
            # A job's `audit_logging` also holds for the answers of its model.
            names = [row["model_name"]]
            jobs = await cached(
                context,
                ("safeguards behind", row["model_name"]),
                lambda connection: job_records.security_settings_of(
                    connection, context.client_id, names
                ),
            )
            for job in jobs:
                context.trail.touch(job)

        self._deployment = shown_deployment(context, row)
        if not is_within_reach(context, self._deployment):
            kind = "endpoint" if target.endpoint_id else "deployment"
            raise ResourceNotFound(f"there is no such {kind}")
        model = self._deployment["model_name"]
        self._served = await cached(
            context,
            ("model", model),
            lambda connection: served_model(connection, self._parts, context.client_id, model),
        )
        # Only now is the deployment known to be the caller's, so the metrics may show this request as in flight.
        self._in_flight.accepted, self._in_flight.endpoint_id = self._started, target.endpoint_id
        note_request(context.span, target, self._served, self._request)

    def _check_can_serve(self) -> None:
        status = DeploymentStatus(self._deployment["status"])
        if status is DeploymentStatus.CREATING:
            text = "the deployment is still being created"
            raise DeploymentError(text, status=503, retry_after=1)
        if status not in SERVING:
            raise DeploymentError(BEING_DELETED if status in GONE else "the deployment has failed")
        # After a restart requests come before the reconciler has checked every deployment, and each of them loads
        # its model.
        try:
            check_served(self._parts, self._deployment["security_settings"], self._served)
        except SafeguardLost as error:
            raise DeploymentError(f"the model cannot be served: {error}") from error
        self._faults = faults_of(
            self._deployment["tags"], allowed=self._parts.settings.allow_fault_injection
        )

    async def _render(self) -> GenerateRequest:
        """Render and tokenize the prompt: on the event loop, or in a thread where that takes long."""
        context, request = self._context, self._request
        if is_long_prompt(request):
            texts = self._parts.threads.texts
            prepared = await texts.run(
                context.client_id, replica_request, self._deployment, self._served, request
            )
        else:
            prepared = replica_request(self._deployment, self._served, request)

        # A drill refuses the longest prompts, in the words of a prompt that is too long.
        lengths, length = self._parts.prompt_lengths, len(prepared.tokens)
        share = self._faults.refuse
        if share and lengths.is_among_longest(self._deployment["id"], length, share):
            raise PromptTooLong(prompt_param(request), str(length), length - 1)
        return prepared

    async def _run(self, prepared: GenerateRequest) -> GeneratedAnswer:
        """Generate within the time limit, with the deployment's injected faults.

        A generation whose replica was lost is run once more, unless the caller has already read some of its text.
        """
        in_flight, faults, text = self._in_flight, self._faults, self._text
        is_emptied, is_cut = drawn(faults.empty_rate), drawn(faults.short)
        if is_emptied or is_cut:
            self._text = None  # the caller must not read what is taken away below
        try:
            async with asyncio.timeout(self._parts.settings.generate_timeout_s) as in_flight.limit:
                await asyncio.sleep(faults.delay_ms / 1000)
                if drawn(faults.error_rate):
                    raise InternalError("an injected fault of this deployment")
                if drawn(faults.hang):
                    await asyncio.get_running_loop().create_future()
                try:
                    written = await self._run_once(prepared)
                except ReplicaLost:
                    if self._has_text and self._request.stream:
                        raise
                    written = await self._run_once(prepared)
        except (TimeoutError, ServingError) as error:
            raise self._contract_error(error) from None
        finally:
            in_flight.limit = None

        if is_emptied:
            return replace(written, completion="")
        if is_cut:
            short, share = shortened(written.completion)
            if text is not None:
                text.emit(short)
            tokens = max(1, round(share * written.completion_tokens))
            return replace(written, completion=short, completion_tokens=tokens)
        return written

    async def _run_once(self, prepared: GenerateRequest) -> GeneratedAnswer:
        """Generate with one replica. Text that is read or searched while it grows is decoded token by token."""
        served, request, in_flight = self._served, self._request, self._in_flight
        group = self._parts.replicas.of(served.base.path)
        tokenizer: Any = served.base.tokenizer
        in_flight.queued(self._context.now)

        if not (request.stop or request.stream):
            tokens: list[int] = []
            async with await group.generate(served.adapter, prepared) as generation:
                async for chunk in generation:
                    in_flight.started()
                    tokens = chunk + await generation.read_all()
                reason = str(generation.finish_reason)
            completion = tokenizer.decode(tokens)
            return GeneratedAnswer(completion, reason, len(prepared.tokens), len(tokens))

        text = Completion(tokenizer.decode, request.stop)
        async with await group.generate(served.adapter, prepared) as generation:
            async for chunk in generation:
                in_flight.started()
                for token in chunk:
                    self._emit(text.take(token))
                    if text.is_stopped:
                        break
                if text.is_stopped:
                    break
            reason = "stop" if text.is_stopped else str(generation.finish_reason)
        self._emit(text.finish())
        return GeneratedAnswer(text.text, reason, len(prepared.tokens), text.tokens)

    def _emit(self, text: str) -> None:
        if text:
            self._has_text = True
            if self._text is not None:
                self._text.emit(text)

    def _contract_error(self, error: Exception) -> ApiError:
        """Turn an error of the replicas, or the end of the time, into one of the contract's."""
        if isinstance(error, TimeoutError):
            if self._in_flight.is_ended:
                return DeploymentError(BEING_DELETED)
            return InternalError("the generation took too long")
        if isinstance(error, NoReplica):
            text = "no replica of the model can answer now"
            return InternalError(text, status=503, retry_after=1)
        if isinstance(error, ReplicaLost):
            text = "the model's process ended during the generation"
            return InternalError(text, status=503, retry_after=1)
        if isinstance(error, RequestTooLarge):
            return refused("max_tokens", f"asks for too much: {error}", "out_of_range")
        return InternalError("the model could not generate")

    async def _audit(self, usage: Usage) -> None:
        """Count the tokens in the audit chain.

        The HTTP boundary writes a whole answer's row after this, but that of a stream when the stream starts, which
        may be before or after its end: so the tokens of a stream get a row of their own.
        """
        trail = self._context.trail
        if not self._request.stream:
            trail.count(usage)
        elif trail.is_required:
            ended = replace(self._context, trail=replace(trail))
            ended.trail.count(usage)
            await asyncio.to_thread(ended.commit_audit_entry, 200)
