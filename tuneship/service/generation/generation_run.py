"""One generation, from the choice of its deployment's model to the recorded answer, whole or streamed.

A caller who disconnects cancels it. Next: `prompts.py` (the request to the replica), `accounting.py` (how it ended),
`text_stream.py` (the text while it is generated).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tuneship.contract.deployments import GONE, SERVING, DeploymentStatus
from tuneship.contract.errors import ApiError, DeploymentError, InternalError, ResourceNotFound
from tuneship.contract.generation import (
    Generate,
    GeneratedChoice,
    GeneratedText,
    Generation,
    TokenLogprob,
    Usage,
)
from tuneship.runtime.replica_protocol import NoReplica
from tuneship.service.common.fault_injection import Faults, drawn, faults_of, shortened
from tuneship.service.common.in_flight import InFlightGeneration
from tuneship.service.common.refusals import refused
from tuneship.service.common.streaming import Stream
from tuneship.service.context.context import Context
from tuneship.service.deployments.handlers import shown_deployment
from tuneship.service.generation.accounting import (
    GenerationAccount,
    WrittenAnswer,
    WrittenAnswers,
)
from tuneship.service.generation.answer_grammar import answer_grammar
from tuneship.service.generation.answer_run import AnswerRun, Emit
from tuneship.service.generation.prompts import (
    PromptTooLong,
    RawPrompt,
    is_long_prompt,
    prompt_param,
    raw_prompts,
    replica_requests,
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
    UnusableGrammar,
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
    written: WrittenAnswers
    """The answers, known after `answer` has returned or the stream has ended."""

    def __init__(
        self,
        context: Context,
        target: RoutingTarget,
        request: Generate,
        started: float,
        prompts: Sequence[RawPrompt] = (),
    ) -> None:
        """Begin with nothing but the request; `started` is when it came, by `time.perf_counter`.

        `prompts` without a template take the place of the request's own.
        """
        self._context = context
        self._parts = context.parts
        self._target = target
        self._request = request
        self._started = started
        self._prompts = prompts or raw_prompts(request)
        self._text: TextStream | None = None

    async def stream(self) -> Stream:
        """Run in a task of its own, and return when the first text is there."""
        self._text = TextStream(self._context.request_id)
        return await self._text.open(self.answer())

    async def answer(self) -> Generation:
        """Run from the routing to the record. Raises the contract's errors."""
        context, target = self._context, self._target
        tracked = self._parts.in_flight.track(
            target.deployment_id, is_background=context.is_background
        )
        with tracked as self._in_flight:
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
        self.written = written
        return self._generation(usage)

    def _generation(self, usage: Usage) -> Generation:
        choices = [
            GeneratedChoice(
                completion=answer.completion,
                finish_reason=answer.finish_reason,
                logprobs=answer.logprobs,
            )
            for answer in self.written.answers
        ]
        return Generation(
            id=new_id("gen"),
            deployment_id=self._target.deployment_id,
            prompt=self._request.prompt,
            completion=choices[0].completion,
            finish_reason=choices[0].finish_reason,
            logprobs=choices[0].logprobs,
            prompt_logprobs=self.written.answers[0].prompt_logprobs,
            choices=choices if len(choices) > 1 else None,
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

    def text_of(self, prompt: RawPrompt) -> str:
        """The text of a prompt without a template, special tokens included. Only after the answer."""
        if isinstance(prompt, str):
            return prompt
        tokenizer: Any = self._served.base.tokenizer
        return tokenizer.decode(prompt, skip_special_tokens=False)

    async def _render(self) -> list[GenerateRequest]:
        """Render and tokenize each prompt: on the event loop, or in a thread where that takes long."""
        context, request = self._context, self._request
        if is_long_prompt(request, self._prompts):
            texts = self._parts.threads.texts
            prepared = await texts.run(
                context.client_id,
                replica_requests,
                self._deployment,
                self._served,
                request,
                self._prompts,
            )
        else:
            prepared = replica_requests(self._deployment, self._served, request, self._prompts)
        if request.response_format is not None and request.response_format.type != "text":
            grammar = await self._parts.threads.texts.run(
                context.client_id, answer_grammar, request.response_format
            )
            prepared = [replace(one, grammar=grammar) for one in prepared]
        if context.is_background:
            prepared = [replace(one, is_background=True) for one in prepared]

        # A drill refuses the longest prompts, in the words of a prompt that is too long.
        lengths, length = self._parts.prompt_lengths, max(len(one.tokens) for one in prepared)
        share = self._faults.refuse
        if share and lengths.is_among_longest(self._deployment["id"], length, share):
            raise PromptTooLong(prompt_param(request), str(length), length - 1)
        return prepared

    async def _run(self, prepared: list[GenerateRequest]) -> WrittenAnswers:
        """Generate within the time limit, with the deployment's injected faults."""
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
                answers = await self._run_all(prepared)
        except (TimeoutError, ServingError) as error:
            raise self._contract_error(error) from None
        finally:
            in_flight.limit = None

        if (is_emptied or is_cut) and prepared[0].grammar is not None:
            answers = [replace(answer, finish_reason="length") for answer in answers]
        if is_emptied:
            answers = [replace(answer, completion="", logprobs=None) for answer in answers]
        elif is_cut:
            answers = [_shortened(answer) for answer in answers]
            if text is not None:
                for number, answer in enumerate(answers):
                    self._emitter(text, number)(answer.completion, None)
        return WrittenAnswers(answers, sum(len(one.tokens) for one in prepared))

    async def _run_all(self, prepared: list[GenerateRequest]) -> list[WrittenAnswer]:
        """Write all answers at once. Those that share a prompt wait until the first of them has read it.

        The first error ends the others. Raises `ServingError`.
        """
        now, count = self._context.now, self._request.n
        runs = [
            AnswerRun(self._parts, self._served, self._request, one, self._in_flight)
            for prompt in prepared
            for one in _with_own_seeds(prompt, count)
        ]
        stream = self._text
        emitters = [
            None if stream is None else self._emitter(stream, number) for number in range(len(runs))
        ]
        if len(runs) == 1:
            return [await runs[0].run(now, emitters[0])]

        async def follow(number: int) -> WrittenAnswer:
            if number % count:
                await runs[number - number % count].begun.wait()
            answer = await runs[number].run(None if number else now, emitters[number])
            runs[number].begun.set()  # also where it has no token
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(follow(number)) for number in range(len(runs))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _emitter(self, text: TextStream, number: int) -> Emit:
        """Return the function that puts the text of an answer on the stream."""
        index = number if max(1, len(self._prompts)) * self._request.n > 1 else None

        def emit(piece: str, logprobs: list[TokenLogprob] | None) -> None:
            text.emit(GeneratedText(text=piece, index=index, logprobs=logprobs))

        return emit

    def _contract_error(self, error: Exception) -> ApiError:
        """Turn an error of the replicas, or the end of the time, into one of the contract's."""
        if isinstance(error, TimeoutError):
            if self._in_flight.is_ended:
                return DeploymentError(BEING_DELETED)
            return InternalError("the generation took too long")
        if isinstance(error, NoReplica | ReplicaLost):
            text = "the model's process ended during the generation"
            if isinstance(error, NoReplica):
                text = "no replica of the model can answer now"
            return InternalError(text, status=503, retry_after=1)
        if isinstance(error, RequestTooLarge):
            return refused("max_tokens", f"asks for too much: {error}", "out_of_range")
        if isinstance(error, UnusableGrammar):
            return refused("response_format", str(error))
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


def _with_own_seeds(prepared: GenerateRequest, count: int) -> list[GenerateRequest]:
    """The requests for `count` answers to one prompt, whose own log probabilities only the first one tells."""
    if count == 1:
        return [prepared]
    seed = prepared.seed
    seeds = [None if seed is None else (seed + number) % 2**63 for number in range(count)]
    others = replace(prepared, prompt_logprobs=None)
    return [replace(others if number else prepared, seed=one) for number, one in enumerate(seeds)]


def _shortened(answer: WrittenAnswer) -> WrittenAnswer:
    """The answer as a drill cuts it off."""
    short, share = shortened(answer.completion)
    tokens = max(1, round(share * answer.tokens))
    return replace(answer, completion=short, tokens=tokens, logprobs=None)
