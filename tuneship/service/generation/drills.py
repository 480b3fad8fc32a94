"""Runs whose deployment misbehaves as its `fault.*` tags say (`deployments/faults.py`), for drills, tests and the demo.

They take the place of the others in a service that was started with `--allow-fault-injection`. A drill stands around
the run and not around the replicas: it counts requests, however many answers each has, and words, not tokens.
"""

import asyncio
import random
import re
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tuneship.contract.embeddings import Embed
from tuneship.contract.errors import InternalError
from tuneship.contract.generation import Generate
from tuneship.contract.token_inputs import TextOrIds
from tuneship.service.context.context import Context
from tuneship.service.deployments.faults import Faults, faults_of
from tuneship.service.generation.accounting import WrittenAnswer, WrittenAnswers
from tuneship.service.generation.call_reader import ReadPiece
from tuneship.service.generation.embedding_run import EmbeddingRun
from tuneship.service.generation.generation_run import GenerationRun
from tuneship.service.generation.prompts import PromptTooLong, prompt_param
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.service.generation.routing import RoutingTarget
from tuneship.serving.replica_client import GenerateRequest

# Earlier prompts of a deployment with which the length of a new one is compared.
PROMPTS_REMEMBERED = 200
# An answer that is cut keeps one of this many words.
KEPT_OF_WORDS = 5


def generation_run(
    context: Context,
    target: RoutingTarget,
    request: Generate,
    started: float,
    prompts: Sequence[TextOrIds] = (),
) -> GenerationRun:
    """Make the run of a request for a completion; see `GenerationRun`."""
    is_drill = context.parts.settings.allow_fault_injection
    kind = DrilledGeneration if is_drill else GenerationRun
    return kind(context, target, request, started, prompts)


def embedding_run(
    context: Context, target: RoutingTarget, request: Embed, started: float
) -> EmbeddingRun:
    """Make the run of a request for embeddings; see `EmbeddingRun`."""
    is_drill = context.parts.settings.allow_fault_injection
    kind = DrilledEmbedding if is_drill else EmbeddingRun
    return kind(context, target, request, started)


class _DrilledRun(RoutedRun):
    """The faults that every request may meet."""

    _faults: Faults

    def _check_can_serve(self) -> None:
        super()._check_can_serve()
        self._faults = faults_of(self._deployment["tags"])

    @asynccontextmanager
    async def _limited(self) -> AsyncGenerator[None]:
        """First wait, fail or hang, which counts towards the time limit."""
        async with super()._limited():
            await asyncio.sleep(self._faults.delay_ms / 1000)
            if drawn(self._faults.error_rate):
                raise InternalError("an injected fault of this deployment")
            if drawn(self._faults.hang):
                await asyncio.get_running_loop().create_future()
            yield


class DrilledEmbedding(_DrilledRun, EmbeddingRun):
    """A request for embeddings."""


class DrilledGeneration(_DrilledRun, GenerationRun):
    """A request for a completion, which may also be refused, emptied or cut."""

    async def _render(self) -> list[GenerateRequest]:
        """Refuse the longest prompts, in the words of a prompt that is too long."""
        prepared = await super()._render()
        share, length = self._faults.refuse, max(len(one.tokens) for one in prepared)
        if share and PROMPT_LENGTHS.is_among_longest(self._deployment["id"], length, share):
            raise PromptTooLong(prompt_param(self._request), str(length), length - 1)
        return prepared

    async def _run(self, prepared: list[GenerateRequest]) -> WrittenAnswers:
        """Answer with an empty text or with the first words only, if the drawn fault says so."""
        is_emptied, is_cut = drawn(self._faults.empty_rate), drawn(self._faults.short)
        if not (is_emptied or is_cut):
            return await super()._run(prepared)
        # The caller must not read what is cut off below.
        text, self._text = self._text, None
        written = await super()._run(prepared)
        answers = list[WrittenAnswer]()
        for number, answer in enumerate(written.answers):
            kept, tokens = "", answer.tokens
            if not is_emptied:
                kept, share = shortened(answer.completion)
                tokens = max(1, round(share * tokens))
                if text is not None:
                    self._emitter(text, number)(ReadPiece(kept), None)
            # What follows a grammar ends within it, as at its limit.
            reason = answer.finish_reason if prepared[0].grammar is None else "length"
            left = replace(answer, completion=kept, tokens=tokens, finish_reason=reason)
            answers.append(replace(left, tool_calls=None, logprobs=None))
        return replace(written, answers=answers)


class PromptLengths:
    """The lengths of the latest prompts to deployments with `fault.refuse`. Lives on the event loop."""

    def __init__(self) -> None:
        """Start without prompts."""
        self._seen: defaultdict[str, deque[int]] = defaultdict(
            lambda: deque(maxlen=PROMPTS_REMEMBERED)
        )

    def is_among_longest(self, deployment_id: str, length: int, share: float) -> bool:
        """Whether this prompt is in the longest share of the latest ones; equal ones are drawn at random."""
        seen = self._seen[deployment_id]
        shorter = sum(earlier < length for earlier in seen)
        position = shorter + random.random() * (seen.count(length) + 1)  # noqa: S311 - a drill, not a secret
        rank = position / (len(seen) + 1)
        seen.append(length)
        return rank >= 1 - share


PROMPT_LENGTHS = PromptLengths()


def drawn(share: float) -> bool:
    """Whether this request is in the share, drawn at random."""
    return random.random() < share  # noqa: S311 - a drill, not a secret


def shortened(text: str) -> tuple[str, float]:
    """The first fifth of the words (at least one), and the share of the words that is kept."""
    words = list(re.finditer(r"\S+", text))
    if not words:
        return text, 1.0
    kept = max(1, len(words) // KEPT_OF_WORDS)
    return text[: words[kept - 1].end()], kept / len(words)
