"""Writes one answer of a request: from the request to a replica to the text, with log probabilities.

An answer whose replica was lost is written once more, unless the caller has already read some of its text.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tuneship.contract.generation import Generate, TokenLogprob
from tuneship.prompts.text_tokenizer import visible_end
from tuneship.service.context.context import Context
from tuneship.service.generation.accounting import WrittenAnswer
from tuneship.service.generation.call_reader import CallReader, ReadPiece
from tuneship.service.generation.completion_text import AnswerCut, Completion
from tuneship.service.generation.token_logprobs import AnswerLogprobs, logprob_of, prompt_logprobs
from tuneship.service.generation.tool_grammar import CallPlan
from tuneship.service.models.served_models import ServedModel
from tuneship.service.telemetry.in_flight import InFlightGeneration
from tuneship.serving.replica_client import GenerateRequest, ReplicaLost, TokenStream
from tuneship.serving.sampling.grammar import accepts

# Log probabilities beyond which naming their tokens would hold up the event loop: a thousand take some milliseconds.
LONG_SCORES = 1_000
# Tokens of a chunk after which the event loop may do other work.
TOKENS_TOGETHER = 32

Emit = Callable[[ReadPiece, list[TokenLogprob] | None], None]


class AnswerRun:
    """Writes one answer, within the deadline of its request."""

    def __init__(  # noqa: PLR0913 (the parts of an answer)
        self,
        context: Context,
        served: ServedModel,
        request: Generate,
        prepared: GenerateRequest,
        in_flight: InFlightGeneration,
        *,
        plan: CallPlan | None = None,
        is_raw: bool = False,
    ) -> None:
        """`request`: settings for decoding the tokens of `prepared`. `plan`: how to read calls of functions.

        `is_raw`: the prompt was not rendered by the template, so its answer is no turn of a conversation.
        """
        self._replicas = context.parts.replicas
        self._texts = context.parts.threads.texts
        self._served = served
        self._request = request
        self._prepared = prepared
        self._in_flight = in_flight
        self._plan = plan
        before = visible_end(served.base.tokenizer, prepared.tokens)
        text_format, stops = served.format, request.stop or ()
        self._cut = AnswerCut(before, stops=stops)
        if not is_raw:
            own_stop = [] if text_format.stop_text is None else [text_format.stop_text]
            self._cut = AnswerCut(before, text_format.lead, text_format.pad, [*stops, *own_stop])
        self._reader: CallReader | None = None
        self._emit: Emit | None = None
        self._has_text = False
        self._released = 0
        # Set when the prompt has been read: another answer to it finds its prefix in the cache.
        self.begun = asyncio.Event()

    async def run(self, now: datetime | None, emit: Emit | None) -> WrittenAnswer:
        """Write the answer; `emit` gets each piece of the text. Raises `ServingError`.

        `now`: the request waits for its first token since then; None where another of its answers says so.
        """
        self._emit = emit
        try:
            return await self._run_once(now)
        except ReplicaLost:
            if self._has_text and self._request.stream:
                raise
            return await self._run_once(now)

    async def _run_once(self, now: datetime | None) -> WrittenAnswer:
        """Write with one replica. Text that is read or searched while it grows is decoded token by token."""
        base, request = self._served.base, self._request
        self._reader = None if self._plan is None else self._plan.reader()
        self._released = 0
        group = self._replicas.of(base.path)
        if now is not None:
            self._in_flight.queued(now)
        async with await group.generate(self._served.adapter, self._prepared) as generation:
            if self._cut.stops or request.stream or request.logprobs is not None:
                return await self._by_token(generation)
            tokens: list[int] = []
            async for chunk in generation:
                self._note_start()
                tokens = chunk + await generation.read_all()
        reason = str(generation.finish_reason)
        text = self._text(tokens, has_ended=reason == "stop")
        if self._reader is not None:
            self._reader.feed(text, is_last=True)
        return self._written(text, reason, len(tokens))

    def _text(self, tokens: list[int], *, has_ended: bool) -> str:
        """The text of a whole answer without stop texts."""
        before = list(self._cut.before)
        start, whole = self._decode(before), self._decode(before + tokens)
        text = whole[len(start) :] if whole.startswith(start) else self._decode(tokens)
        text = text.removeprefix(self._cut.lead)
        return text.removesuffix(self._cut.pad) if has_ended else text

    def _decode(self, tokens: list[int]) -> str:
        tokenizer: Any = self._served.base.tokenizer
        if self._plan is None:
            return tokenizer.decode(tokens)
        # The marks of a call may be special tokens, which decoding leaves out otherwise.
        shown = [token for token in tokens if token not in self._plan.hidden_tokens]
        return tokenizer.decode(shown, skip_special_tokens=False)

    def _written(self, text: str, reason: str, tokens: int, **more: Any) -> WrittenAnswer:
        """The answer with its calls; one that was cut within a call ends as at its limit."""
        reader = self._reader
        if reader is None:
            return WrittenAnswer(text, reason, tokens, **more)
        if not reader.is_complete:
            reason = "length"
        elif reader.calls and reason != "length":
            reason = "tool_calls"
        return WrittenAnswer(reader.text, reason, tokens, tool_calls=reader.calls or None, **more)

    async def _by_token(self, generation: TokenStream) -> WrittenAnswer:
        base, request = self._served.base, self._request
        text = Completion(self._decode, self._cut)
        logprobs = None if request.logprobs is None else AnswerLogprobs(base.token_texts)
        async for chunk in generation:
            self._note_start()
            for number, token in enumerate(chunk, 1):
                piece = text.take(token)
                if logprobs is not None:
                    logprobs.add(generation.scores[text.tokens - 1])
                self._pass_on(piece, text, logprobs)
                if text.is_stopped:
                    break
                if number % TOKENS_TOGETHER == 0:
                    await asyncio.sleep(0)
            if text.is_stopped:
                break
        reason = str(generation.finish_reason)
        last = text.finish(has_ended=reason == "stop")
        self._pass_on(last, text, logprobs, is_end=True, is_last=not text.is_stopped)
        if text.is_stopped:
            reason = "stop" if await self._is_whole(text.text) else "length"
        if logprobs is None:
            return self._written(text.text, reason, text.tokens)
        is_ended = not text.is_stopped and len(generation.scores) > text.tokens
        return self._written(
            text.text,
            reason,
            text.tokens,
            logprobs=logprobs.given,
            end=logprob_of(base.token_texts, generation.scores[text.tokens]) if is_ended else None,
            prompt_logprobs=await self._of_the_prompt(generation),
        )

    async def _is_whole(self, text: str) -> bool:
        """Whether a text that a stop text ended satisfies the request's format."""
        grammar, owner = self._prepared.grammar, self._prepared.owner
        if self._plan is not None and self._reader is not None:
            if self._reader.calls or not self._reader.is_complete:
                return self._reader.is_complete
            grammar = self._plan.text_grammar
        return grammar is None or await self._texts.run(owner, accepts, grammar, text)

    async def _of_the_prompt(self, generation: TokenStream) -> list[TokenLogprob] | None:
        alternatives, tokens = self._prepared.prompt_logprobs, self._prepared.tokens
        if alternatives is None:
            return None
        named = self._served.base.token_texts, tokens, generation.prompt_scores
        if len(tokens) * (1 + alternatives) < LONG_SCORES:
            return prompt_logprobs(*named)
        return await self._texts.run(self._prepared.owner, prompt_logprobs, *named)

    def _note_start(self) -> None:
        self._in_flight.started()
        self.begun.set()

    def _pass_on(
        self,
        piece_text: str,
        text: Completion,
        logprobs: AnswerLogprobs | None,
        *,
        is_end: bool = False,
        is_last: bool = False,
    ) -> None:
        """Emit the next piece of the text. `is_end`: it is the last piece; `is_last`: no stop text cut it off
        either.
        """
        released = None
        if logprobs is not None:
            self._released += len(piece_text)
            released = logprobs.release(text.left_out + self._released, is_last=is_last)
        reader = self._reader
        piece = ReadPiece(piece_text) if reader is None else reader.feed(piece_text, is_last=is_end)
        if piece.text or piece.calls or released:
            self._has_text = True
            if self._emit is not None:
                self._emit(piece, released)
