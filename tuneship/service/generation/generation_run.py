"""One generation, from the choice of its deployment's model to the recorded answer, whole or streamed.

A caller who disconnects cancels it. Next: `routed_run.py` (what embeddings share), `prompts.py` (the request to the
replica), `accounting.py` (how it ended), `text_stream.py` (the text while it is generated).
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tuneship.contract.generation import (
    MAXIMUM_LOGPROBS,
    Generate,
    GeneratedChoice,
    GeneratedText,
    Generation,
    TokenLogprob,
    Usage,
)
from tuneship.contract.token_inputs import TextOrIds
from tuneship.prompts.template import TemplateTooSlow
from tuneship.service.answers.field_errors import field_error
from tuneship.service.answers.long_answers import is_long
from tuneship.service.answers.streaming import Stream
from tuneship.service.context.context import Context
from tuneship.service.generation.accounting import WrittenAnswer, WrittenAnswers
from tuneship.service.generation.answer_grammar import answer_grammar
from tuneship.service.generation.answer_run import AnswerRun, Emit
from tuneship.service.generation.call_reader import ReadPiece
from tuneship.service.generation.prompts import (
    ON_THE_LOOP,
    is_long_prompt,
    raw_prompts,
    replica_requests,
)
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.service.generation.routing import RoutingTarget
from tuneship.service.generation.span import note_answer, note_request
from tuneship.service.generation.text_stream import TextStream
from tuneship.service.generation.tool_grammar import CallPlan, call_plan
from tuneship.service.models.served_models import ServedModel
from tuneship.serving.replica_client import GenerateRequest
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.rows import Row


class GenerationRun(RoutedRun):
    """One request for a completion. Its methods are in the order in which they run."""

    work = "generation"
    too_large_param = "max_tokens"
    # The answers, known after `answer` has returned or the stream has ended.
    written: WrittenAnswers
    # The same as the main API's reply.
    generation: Generation

    def __init__(
        self,
        context: Context,
        target: RoutingTarget,
        request: Generate,
        started: float,
        prompts: Sequence[TextOrIds] = (),
    ) -> None:
        """Begin with nothing but the request; `started` is when it came, by `time.perf_counter`.

        `prompts` without a template take the place of the request's own.
        """
        super().__init__(context, target, started)
        self._request = request
        self._prompts = prompts or raw_prompts(request)
        self._text: TextStream | None = None
        self._plan: CallPlan | None = None

    async def stream(self) -> Stream:
        """Run in a new task, and return when the first text has arrived."""
        self._text = TextStream(self._context.request_id)
        return await self._text.open(self.answer())

    async def answer(self) -> Generation:
        async with self._accounted() as account:
            written = await self._run(await self._render())
            first_token = self._in_flight.first_token
            account.succeeded(written, first_token)
            note_answer(self._context.span, written, self._started, first_token)

        usage = Usage(
            prompt_tokens=written.prompt_tokens,
            completion_tokens=written.completion_tokens,
            total_tokens=written.prompt_tokens + written.completion_tokens,
        )
        # The HTTP boundary writes a whole answer's row of the audit chain after this, but that of a stream when the
        # stream starts, which may be before or after its end: so the tokens of a stream get a row of their own.
        facts = self._context.audit_facts
        if not self._request.stream:
            facts.count(usage)
        elif facts.is_required:
            ended = replace(self._context, audit_facts=replace(facts))
            ended.audit_facts.count(usage)
            await asyncio.to_thread(ended.commit_audit_entry, 200)
        self.written = written
        self.generation = self._generation(usage)
        return self.generation

    def _is_long(self) -> bool:
        return is_long(
            [
                [one.completion, one.tool_calls, one.logprobs, one.prompt_logprobs]
                for one in self.written.answers
            ]
        )

    def _generation(self, usage: Usage) -> Generation:
        choices = [
            GeneratedChoice(
                completion=answer.completion,
                tool_calls=answer.tool_calls,
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
            tool_calls=choices[0].tool_calls,
            finish_reason=choices[0].finish_reason,
            logprobs=choices[0].logprobs,
            prompt_logprobs=self.written.answers[0].prompt_logprobs,
            choices=choices if len(choices) > 1 else None,
            usage=usage,
        )

    def _note_request(self) -> None:
        note_request(self._context.span, self._target, self._served, self._request)

    def text_of(self, prompt: TextOrIds) -> str:
        """The text of a prompt without a template, special tokens included. Only after the answer."""
        if isinstance(prompt, str):
            return prompt
        tokenizer: Any = self._served.base.tokenizer
        return tokenizer.decode(prompt, skip_special_tokens=False)

    async def _render(self) -> list[GenerateRequest]:
        """Render and tokenize each prompt: on the event loop, or in a thread where that takes long."""
        context, request = self._context, self._request
        asked = self._deployment, self._served, request, self._prompts
        prepared = None
        if self._served.is_read and not is_long_prompt(request, self._prompts):
            # How much a template computes and writes shows only when it renders.
            with suppress(TemplateTooSlow):
                prepared = replica_requests(*asked, ON_THE_LOOP)
        if prepared is None:
            texts = self._parts.threads.texts
            prepared = await texts.run(context.client_id, _read_and_prepared, *asked)
        self._check_logprobs(prepared)
        if request.callable_tools:
            self.grammar_param = "tools"
            self._plan = await self._parts.threads.texts.run(
                context.client_id, call_plan, self._served, request
            )
            prepared = [replace(one, grammar=self._plan.grammar) for one in prepared]
        elif request.response_format is not None and request.response_format.type != "text":
            grammar = await self._parts.threads.texts.run(
                context.client_id, answer_grammar, request.response_format
            )
            prepared = [replace(one, grammar=grammar) for one in prepared]
        if context.is_background:
            prepared = [replace(one, is_background=True) for one in prepared]
        return prepared

    def _check_logprobs(self, prepared: Sequence[GenerateRequest]) -> None:
        """Refuse a request for very many log probabilities."""
        alternatives, count = self._request.logprobs, self._request.n
        if alternatives is None:
            return
        tokens = sum(
            count * one.max_tokens + (0 if one.prompt_logprobs is None else len(one.tokens))
            for one in prepared
        )
        asked = tokens * (1 + alternatives)
        if asked > MAXIMUM_LOGPROBS:
            text = (
                f"asks for up to {asked} log probabilities, one request may have {MAXIMUM_LOGPROBS}"
            )
            raise field_error("logprobs", text, "out_of_range")

    async def _run(self, prepared: list[GenerateRequest]) -> WrittenAnswers:
        """Generate within the time limit."""
        async with self._limited():
            answers = await self._run_all(prepared)
        return WrittenAnswers(answers, sum(len(one.tokens) for one in prepared))

    async def _run_all(self, prepared: list[GenerateRequest]) -> list[WrittenAnswer]:
        """Write all answers at once; answers to the same prompt wait until the first of them has read it.

        The first error ends the others. Raises `ServingError`.
        """
        now, count = self._context.now, self._request.n
        runs = [
            AnswerRun(
                self._context,
                self._served,
                self._request,
                one,
                self._in_flight,
                plan=self._plan,
                is_raw=bool(self._prompts),
            )
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

        def emit(piece: ReadPiece, logprobs: list[TokenLogprob] | None) -> None:
            text.emit(
                GeneratedText(
                    text=piece.text,
                    tool_calls=piece.calls or None,
                    index=index,
                    logprobs=logprobs,
                )
            )

        return emit


def _read_and_prepared(
    deployment: Row, served: ServedModel, request: Generate, prompts: Sequence[TextOrIds]
) -> list[GenerateRequest]:
    """The requests to the replica, after everything was read that the event loop looks up for this model."""
    served.read()
    return replica_requests(deployment, served, request, prompts)


def _with_own_seeds(prepared: GenerateRequest, count: int) -> list[GenerateRequest]:
    """The requests for `count` answers to one prompt, whose own log probabilities only the first one returns."""
    if count == 1:
        return [prepared]
    seed = prepared.seed
    seeds = [None if seed is None else (seed + number) % 2**63 for number in range(count)]
    others = replace(prepared, prompt_logprobs=None)
    return [replace(others if number else prepared, seed=one) for number, one in enumerate(seeds)]
