"""The engine of a replica: schedule, forward pass, sampling, once per token of all running requests.

Independent of the socket (`replica`) and of the origin of the model (`model`).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tuneship.serving.adapters import AdapterRefused, read_adapter
from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.kv_slots import KvSlots
from tuneship.serving.lora import Lora
from tuneship.serving.merged_weights import MERGED_BYTES
from tuneship.serving.models.model import CausalModel
from tuneship.serving.parity_check import check_parity
from tuneship.serving.sampling import sampler
from tuneship.serving.sampling.guides import Guide
from tuneship.serving.sampling.scores import PROMPT_LOGITS, scores_of
from tuneship.serving.scheduler import Scheduler
from tuneship.serving.sequence import FinishReason, GenerateRequest, Sequence, TokenScore


class RequestRefused(Exception):
    """The request cannot be served; other requests are not affected."""


class SequenceTooLarge(RequestRefused):
    """The request needs more memory than the whole KV cache has."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much the engine does at once."""

    # Sequences in the running batch; more wait.
    slots: int = 32
    # Prompt tokens to prefill per step, so that prefills do not stall decoding; longer prompts go in chunks.
    prompt_tokens: int = 2000
    # Size limit of the KV cache; None: as much as `slots` sequences of full length need.
    cache_bytes: int | None = None
    # A KV cache up to this size is kept while the engine is idle.
    kept_bytes: int = 16 << 20
    # Models whose products are larger in total get no merged weights (`merged_weights`).
    merged_bytes: int = MERGED_BYTES


@dataclass(slots=True)
class StepResult:
    """The outcome of one step, by request id."""

    tokens: list[tuple[str, int]] = field(default_factory=list)
    finished: list[tuple[str, FinishReason]] = field(default_factory=list)
    # Id and error message.
    failed: list[tuple[str, str]] = field(default_factory=list)
    # Ids of requests that ended because a step of their grammar was too complex.
    unfollowed: list[str] = field(default_factory=list)
    # Scores of the new tokens whose requests ask for it, a stop token included.
    scores: list[tuple[str, TokenScore]] = field(default_factory=list)
    # Scores of the next tokens of prompts whose requests ask for it.
    prompt_scores: list[tuple[str, list[TokenScore]]] = field(default_factory=list)


class Engine:
    """One base model, its adapters, and the requests in flight."""

    def __init__(self, model: CausalModel, limits: EngineLimits) -> None:
        """Allocate no more memory than the model already has."""
        self._model = model
        self._limits = limits
        self._lora = Lora(model.sites, model.facts.cache.dtype, limits.merged_bytes)
        tokens = limits.slots * model.facts.context_length
        if limits.cache_bytes is not None:
            tokens = min(tokens, limits.cache_bytes // model.facts.cache.token_bytes)
        scored = max(1, PROMPT_LOGITS // model.facts.vocabulary)
        self._scheduler = Scheduler(limits.slots, limits.prompt_tokens, tokens, scored)
        slots, length = self._scheduler.total_slots, model.facts.context_length
        self._cache = SlotCache(model.facts.cache, slots, length, tokens)
        self._slots = KvSlots(model.facts.short_tokens)
        self._restart_length: int | None = None
        if model.facts.is_recomputed and model.facts.short_tokens is not None:
            self._restart_length = model.facts.short_tokens + 1
        self._sequences: dict[str, Sequence] = {}
        self._guides: dict[str, Guide] = {}
        self._steps = self._generated = self._reused = 0

    @property
    def model(self) -> CausalModel:
        """The base model, which embeddings share."""
        return self._model

    @property
    def lora(self) -> Lora:
        """The adapters, which embeddings share."""
        return self._lora

    @property
    def limits(self) -> EngineLimits:
        """How much it does at once."""
        return self._limits

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return self._scheduler.idle

    @property
    def is_shrunk(self) -> bool:
        """Whether `shrink` would free nothing."""
        return self._cache.bytes_allocated <= self._limits.kept_bytes

    @property
    def moves(self) -> int:
        """A counter that grows whenever adapters move in memory."""
        return self._lora.moves

    @property
    def requests(self) -> list[str]:
        """Ids of all requests in flight, including waiting ones."""
        return list(self._sequences)

    @torch.inference_mode()
    def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Load the adapter directory, whose files `key` opens, under a name. Raises `AdapterRefused`."""
        self._refuse_while_used(adapter)
        self._slots.invalidate_adapter(adapter)
        self._lora.load(adapter, read_adapter(path, key))
        try:
            check_parity(self._model, self._lora, adapter, path, key)
        except AdapterRefused:
            self._lora.unload(adapter)
            raise

    def unload(self, adapter: str) -> None:
        """Unload an adapter. Raises `AdapterRefused` while requests use it or when it is not loaded."""
        self._refuse_while_used(adapter)
        self._slots.invalidate_adapter(adapter)
        if not self._lora.unload(adapter):
            raise AdapterRefused("no adapter of this name is loaded")

    def submit(self, identifier: str, request: GenerateRequest, guide: Guide | None = None) -> None:
        """Queue a request; `guide` keeps its answer to a grammar. Raises `RequestRefused`."""
        facts = self._model.facts
        room = facts.context_length - len(request.tokens) + (request.max_tokens == 0)
        if identifier in self._sequences:
            raise RequestRefused("a request with this id is in flight already")
        if request.adapter is not None and request.adapter not in self._lora:
            raise RequestRefused("no adapter of this name is loaded")
        if not request.tokens or room <= 0:
            raise RequestRefused(
                f"{len(request.tokens)} prompt tokens, the context holds 1 to {facts.context_length - 1}"
            )
        if request.max_tokens < 0:
            raise RequestRefused("max_tokens must be at least 0")
        if min(request.tokens) < 0 or max(request.tokens) >= facts.vocabulary:
            raise RequestRefused("a prompt token is not in the vocabulary")
        sequence = Sequence(identifier, request, min(request.max_tokens, room))
        if not self._scheduler.fits(sequence):
            raise SequenceTooLarge(
                f"{sequence.max_length} tokens of prompt and answer, the memory for them holds "
                f"{self._cache.token_limit}"
            )
        self._sequences[identifier] = sequence
        if guide is not None:
            self._guides[identifier] = guide
        self._scheduler.add(sequence)

    @torch.inference_mode()
    def cancel(self, identifier: str) -> None:
        """Drop a request and free its slot; an unknown id belongs to one that has ended already."""
        sequence = self._sequences.get(identifier)
        if sequence is None:
            return
        if sequence.slot < 0:
            self._scheduler.remove(sequence)
            del self._sequences[identifier]
            self._guides.pop(identifier, None)
            return
        if sequence.is_prefilling:
            # It has no logits yet that would show whether it is finite.
            self._slots.invalidate(sequence.slot)
        else:
            self._slots.register(sequence)
        self._end(sequence)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Let waiting requests join, prefill chunks of prompts, and generate one token of every other sequence."""
        chunks = self._schedule()
        running = self._scheduler.running
        batch = FlatBatch.of(running, chunks)
        adapters = [sequence.request.adapter for sequence in running]
        prefills = zip(adapters[batch.decode_count :], batch.prefills, strict=True)
        routes = self._lora.route(
            adapters[: batch.decode_count],
            [(adapter, prefill.start, prefill.stop) for adapter, prefill in prefills],
        )
        logits = self._model.forward(batch, self._cache, self._lora, routes)
        prompts = list(zip(running[batch.decode_count :], chunks, strict=True))

        # The last rows are of prompts whose own tokens are scored, in the order of the chunks.
        end = len(logits)
        prompt_scores: list[tuple[str, list[TokenScore]]] = []
        for sequence, chunk in reversed(prompts):
            if tokens := sequence.scored_by(chunk):
                rows = logits[end - len(tokens) : end]
                end -= len(tokens)
                count = sequence.request.prompt_logprobs or 0
                prompt_scores.append((sequence.id, scores_of(rows, tokens, [count] * len(tokens))))
            sequence.cached += chunk

        result = self._postprocess(logits[:end])
        result.prompt_scores = prompt_scores
        return result

    def shrink(self) -> None:
        """Free a large KV cache, with the prefixes that it holds, if no request is in flight."""
        if self.idle and not self.is_shrunk:
            self._resize(0, 0)

    def stats(self) -> dict[str, int]:
        """Counts for operators and for the autoscaler."""
        return {
            "running": len(self._scheduler.running),
            "waiting": self._scheduler.waiting,
            "rows": self._limits.slots,
            "adapters": len(self._lora),
            "steps": self._steps,
            "generated_tokens": self._generated,
            "reused_tokens": self._reused,
            "cache_bytes": self._cache.bytes_allocated,
            "cache_limit_bytes": self._cache.token_limit * self._cache.shape.token_bytes,
        }

    def _schedule(self) -> list[int]:
        """Choose the sequences of this step, give new ones slots, and return the chunks to prefill (tokens)."""
        before = len(self._scheduler.running)
        chunks = self._scheduler.schedule()
        running = self._scheduler.running
        longest = max(sequence.length for sequence in running)
        self._resize(*self._cache.size_for(len(running), longest))
        for sequence in running[before:]:
            if sequence.request.adapter is not None:
                self._lora.acquire(sequence.request.adapter)
            prefix = self._slots.assign(sequence)
            if prefix is not None:
                if prefix.source != prefix.target:
                    self._cache.copy(prefix)
                sequence.cached = prefix.length
                self._reused += prefix.length
            self._clear(sequence.slot, sequence.cached)
        # A cached prefix may leave less to prefill than the scheduler knew of.
        prefilling = running[len(running) - len(chunks) :]
        return [min(n, sequence.uncached) for n, sequence in zip(chunks, prefilling, strict=True)]

    def _resize(self, slots: int, length: int) -> None:
        for copy in self._slots.resize(slots, length):
            self._cache.copy(copy)
            self._clear(copy.target, copy.length)
        self._cache.resize(slots, length)

    def _postprocess(self, logits: Tensor) -> StepResult:
        """Choose a token of each sequence with logits [sequences, vocabulary]; end the finished and failed ones."""
        sequences = self._scheduler.running[: len(logits)]
        requests = [sequence.request for sequence in sequences]
        scored = [row for row, request in enumerate(requests) if request.logprobs is not None]
        raw = logits[scored] if scored else None  # a copy: scores are those of the model itself
        self._restrict(logits, sequences)
        highest, tokens = sampler.choose(
            logits,
            [request.temperature for request in requests],
            [request.top_p for request in requests],
            [sequence.rng.random() for sequence in sequences],
        )
        scores: dict[int, TokenScore] = {}
        if raw is not None:
            chosen = scores_of(
                raw,
                [tokens[row] for row in scored],
                [requests[row].logprobs or 0 for row in scored],
            )
            scores = dict(zip(scored, chosen, strict=True))
        result = StepResult()
        for row, (sequence, token, top) in enumerate(zip(sequences, tokens, highest, strict=True)):
            if self._has_failed(sequence, top, result):
                self._slots.invalidate(sequence.slot)
                self._end(sequence)
                continue
            if not sequence.generated:
                # Its logits are finite: other prompts may use its prefix from now on.
                self._slots.register(sequence)
            reason = FinishReason.LENGTH
            if sequence.token_limit:
                if row in scores:
                    result.scores.append((sequence.id, scores[row]))
                reason = self._take(sequence, token, result)
            if reason is not None:
                result.finished.append((sequence.id, reason))
                self._slots.register(sequence)
                self._end(sequence)
            elif self._restart_length is not None and sequence.length == self._restart_length:
                self._restart(sequence)
        self._steps += 1
        self._generated += len(result.tokens)
        return result

    def _has_failed(self, sequence: Sequence, top: float, result: StepResult) -> bool:
        """Whether there is no next token, which is then noted in the result; `top`: the highest logit."""
        guide = self._guides.get(sequence.id)
        if guide is not None and guide.has_failed:
            result.unfollowed.append(sequence.id)
            return True
        if not math.isfinite(top):
            result.failed.append((sequence.id, "the model's output is not finite"))
            return True
        return False

    def _take(self, sequence: Sequence, token: int, result: StepResult) -> FinishReason | None:
        """Add the next token, and return why it ends the sequence, if it does."""
        guide, before = self._guides.get(sequence.id), len(sequence.generated)
        reason = sequence.append(token)
        if len(sequence.generated) > before:  # not a stop token
            result.tokens.append((sequence.id, token))
            if guide is not None and guide.take(token):
                return FinishReason.STOP
        elif guide is not None and not guide.is_complete:
            return FinishReason.LENGTH  # no other token could come, and the answer is not whole
        return reason

    def _restrict(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """Leave the guided rows of logits only the tokens that their grammars allow next."""
        for row, sequence in enumerate(sequences if self._guides else ()):
            if (guide := self._guides.get(sequence.id)) is not None:
                guide.restrict(logits[row])

    def _restart(self, sequence: Sequence) -> None:
        """Have the keys and values of all its tokens computed again: it is a long text from now on."""
        self._slots.register(sequence)
        self._leave(sequence)
        sequence.restart()
        self._scheduler.add_first(sequence)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self._guides.pop(sequence.id, None)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Free the resources of a sequence that stops running."""
        self._scheduler.release(sequence)
        self._slots.release(sequence)
        if sequence.request.adapter is not None:
            self._lora.release(sequence.request.adapter)

    def _clear(self, slot: int, start: int) -> None:
        """Clear the remains of earlier sequences in a slot, from this position on."""
        self._cache.clear(slot, start, self._slots.take_left(slot))

    def _refuse_while_used(self, adapter: str) -> None:
        users = sum(sequence.request.adapter == adapter for sequence in self._sequences.values())
        if users:
            raise AdapterRefused(f"requests are using the adapter: {users}")
