"""One of the answers of a request: from the request to a replica to its text, with the log probabilities of its tokens.

An answer whose replica was lost is written once more, unless the caller has already read some of its text.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tuneship.contract.generation import Generate, TokenLogprob
from tuneship.service.common.in_flight import InFlightGeneration
from tuneship.service.context.context import Parts
from tuneship.service.generation.accounting import WrittenAnswer
from tuneship.service.generation.call_reader import CallReader, ReadPiece
from tuneship.service.generation.completion_text import Completion
from tuneship.service.generation.token_logprobs import AnswerLogprobs, logprob_of, prompt_logprobs
from tuneship.service.generation.tool_grammar import CallPlan
from tuneship.service.models.handlers import ServedModel
from tuneship.serving.grammar import accepts
from tuneship.serving.replica_client import GenerateRequest, ReplicaLost, TokenStream

# Log probabilities beyond which naming their tokens would hold up the event loop: a thousand take some milliseconds.
LONG_SCORES = 1_000

Emit = Callable[[ReadPiece, list[TokenLogprob] | None], None]


class AnswerRun:
    """Writes one answer, within the deadline of its request."""

    def __init__(
        self,
        parts: Parts,
        served: ServedModel,
        request: Generate,
        prepared: GenerateRequest,
        in_flight: InFlightGeneration,
        plan: CallPlan | None = None,
    ) -> None:
        """`request` says how to read the tokens of `prepared`, `plan` how to read calls of functions."""
        self._parts = parts
        self._served = served
        self._request = request
        self._prepared = prepared
        self._in_flight = in_flight
        self._plan = plan
        self._reader: CallReader | None = None
        self._emit: Emit | None = None
        self._has_text = False
        self.begun = asyncio.Event()
        """Set when the prompt has been read: another answer to it finds its prefix in the cache."""

    async def run(self, now: datetime | None, emit: Emit | None) -> WrittenAnswer:
        """Write it; `emit` gets each piece of the text. Raises `ServingError`.

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
        group = self._parts.replicas.of(base.path)
        if now is not None:
            self._in_flight.queued(now)
        async with await group.generate(self._served.adapter, self._prepared) as generation:
            if request.stop or request.stream or request.logprobs is not None:
                return await self._by_token(generation)
            tokens: list[int] = []
            async for chunk in generation:
                self._note_start()
                tokens = chunk + await generation.read_all()
        text = self._decode(tokens)
        if self._reader is not None:
            self._reader.feed(text, is_last=True)
        return self._written(text, str(generation.finish_reason), len(tokens))

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
        text = Completion(self._decode, request.stop)
        logprobs = None if request.logprobs is None else AnswerLogprobs(base.token_texts)
        async for chunk in generation:
            self._note_start()
            for token in chunk:
                piece = text.take(token)
                if logprobs is not None:
                    logprobs.add(generation.scores[text.tokens - 1])
                self._pass_on(piece, logprobs)
                if text.is_stopped:
                    break
            if text.is_stopped:
                break
        self._pass_on(text.finish(), logprobs, is_end=True, is_last=not text.is_stopped)
        reason = str(generation.finish_reason)
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
        """Whether a text that a stop text ended fits what the request asks for."""
        grammar, owner = self._prepared.grammar, self._prepared.owner
        if self._plan is not None and self._reader is not None:
            if self._reader.calls or not self._reader.is_complete:
                return self._reader.is_complete
            grammar = self._plan.text_grammar
        return grammar is None or await self._parts.threads.texts.run(owner, accepts, grammar, text)

    async def _of_the_prompt(self, generation: TokenStream) -> list[TokenLogprob] | None:
        alternatives, tokens = self._prepared.prompt_logprobs, self._prepared.tokens
        if alternatives is None:
            return None
        named = self._served.base.token_texts, tokens, generation.prompt_scores
        if len(tokens) * (1 + alternatives) < LONG_SCORES:
            return prompt_logprobs(*named)
        return await self._parts.threads.texts.run(self._prepared.owner, prompt_logprobs, *named)

    def _note_start(self) -> None:
        self._in_flight.started()
        self.begun.set()

    def _pass_on(
        self,
        text: str,
        logprobs: AnswerLogprobs | None,
        *,
        is_end: bool = False,
        is_last: bool = False,
    ) -> None:
        """Emit the next piece of the text. `is_end`: no text follows it; `is_last`: nor did a stop text cut any off."""
        released = None if logprobs is None else logprobs.release(text, is_last=is_last)
        reader = self._reader
        piece = ReadPiece(text) if reader is None else reader.feed(text, is_last=is_end)
        if piece.text or piece.calls or released:
            self._has_text = True
            if self._emit is not None:
                self._emit(piece, released)
