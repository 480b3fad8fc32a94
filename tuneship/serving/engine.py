"""The loop of a replica: schedule -> run -> postprocess, once per token of all running requests.

Knows neither the socket (`replica`) nor where the model came from (`model`).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tuneship.serving import sampler
from tuneship.serving.adapters import AdapterRefused, read_adapter
from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.kv_slots import KvSlots
from tuneship.serving.lora import Lora, Routes
from tuneship.serving.model import CausalModel
from tuneship.serving.parity_check import prove
from tuneship.serving.scheduler import Scheduler
from tuneship.serving.sequence import FinishReason, GenerateRequest, Sequence

# A cache up to this size stays when nobody uses it.
KEPT_BYTES = 16 << 20


class RequestRefused(Exception):
    """The request cannot be answered; the others are not concerned."""


class SequenceTooLarge(RequestRefused):
    """It needs more memory than all requests together may use."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much runs at once."""

    rows: int = 32
    """Sequences in the batch; more wait their turn."""
    prompt_tokens: int = 2000
    """New prompt tokens per step: bounds how long joiners hold up the others; longer prompts enter in parts."""
    cache_bytes: int | None = None
    """Memory for keys and values; None: as much as rows of full length may need."""


@dataclass(slots=True)
class StepResult:
    """What one step brought, by request id."""

    tokens: list[tuple[str, int]] = field(default_factory=list)
    finished: list[tuple[str, FinishReason]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


class Engine:
    """One base model, its adapters, and the requests under way."""

    def __init__(self, model: CausalModel, limits: EngineLimits) -> None:
        """Allocates nothing beyond what the model holds already."""
        self._model = model
        self._limits = limits
        self._lora = Lora(model.sites, model.facts.cache.dtype)
        tokens = limits.rows * model.facts.context_length
        if limits.cache_bytes is not None:
            tokens = min(tokens, limits.cache_bytes // model.facts.cache.token_bytes)
        self._scheduler = Scheduler(limits.rows, limits.prompt_tokens, tokens)
        rows, length = self._scheduler.all_rows, model.facts.context_length
        self._cache = SlotCache(model.facts.cache, rows, length, tokens)
        self._rows = KvSlots()
        self._sequences: dict[str, Sequence] = {}
        self._steps = self._generated = self._reused = 0

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return self._scheduler.idle

    @property
    def rested(self) -> bool:
        """There is nothing that `rest` would give back."""
        return self._cache.bytes_allocated <= KEPT_BYTES

    @property
    def moves(self) -> int:
        """Grows whenever adapters move in memory."""
        return self._lora.moves

    @property
    def requests(self) -> list[str]:
        """Ids of all requests under way, waiting ones included."""
        return list(self._sequences)

    @torch.inference_mode()
    def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Make an adapter directory, whose files `key` opens, available under a name. Raises `AdapterRefused`."""
        self._refuse_while_used(adapter)
        self._rows.forget_adapter(adapter)
        self._lora.load(adapter, read_adapter(path, key))
        try:
            prove(self._model, self._lora, adapter, path, key)
        except AdapterRefused:
            self._lora.unload(adapter)
            raise

    def unload(self, adapter: str) -> None:
        """Raises `AdapterRefused` while requests use it or when it is not loaded."""
        self._refuse_while_used(adapter)
        self._rows.forget_adapter(adapter)
        if not self._lora.unload(adapter):
            raise AdapterRefused("no adapter of this name is loaded")

    def submit(self, identifier: str, request: GenerateRequest) -> None:
        """Queue a request. Raises `RequestRefused`."""
        facts = self._model.facts
        room = facts.context_length - len(request.tokens)
        if identifier in self._sequences:
            raise RequestRefused("this id is under way already")
        if request.adapter is not None and request.adapter not in self._lora:
            raise RequestRefused("no adapter of this name is loaded")
        if not request.tokens or room <= 0:
            raise RequestRefused(
                f"{len(request.tokens)} prompt tokens, the context holds 1 to {facts.context_length - 1}"
            )
        if request.max_tokens < 1:
            raise RequestRefused("max_tokens must be at least 1")
        if min(request.tokens) < 0 or max(request.tokens) >= facts.vocabulary:
            raise RequestRefused("a prompt token is not in the vocabulary")
        sequence = Sequence(identifier, request, min(request.max_tokens, room))
        if not self._scheduler.fits(sequence):
            raise SequenceTooLarge(
                f"{sequence.longest} tokens of prompt and answer, the memory for them holds {self._cache.token_limit}"
            )
        self._sequences[identifier] = sequence
        self._scheduler.add(sequence)

    @torch.inference_mode()
    def cancel(self, identifier: str) -> None:
        """Forget a request and free its row; an unknown id has ended already."""
        sequence = self._sequences.get(identifier)
        if sequence is None:
            return
        if sequence.row < 0:
            self._scheduler.remove(sequence)
            del self._sequences[identifier]
        else:
            if sequence.is_entering:  # nobody has looked yet whether its numbers are finite
                self._clear(sequence.row)
            else:
                self._rows.hold(sequence)
            self._end(sequence)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """One more token for every running sequence, after the waiting ones that fit have joined."""
        parts = self._schedule()
        return self._postprocess(self._run(parts))

    def rest(self) -> None:
        """Nothing has run for a while: give back a large cache, and what it held."""
        if self.idle and not self.rested:
            self._resize(0, 0)

    def stats(self) -> dict[str, int]:
        """Counts for people and for the autoscaler."""
        return {
            "running": len(self._scheduler.running),
            "waiting": self._scheduler.waiting,
            "rows": self._limits.rows,
            "adapters": len(self._lora),
            "steps": self._steps,
            "generated_tokens": self._generated,
            "reused_tokens": self._reused,
            "cache_bytes": self._cache.bytes_allocated,
            "cache_limit_bytes": self._cache.token_limit * self._cache.shape.token_bytes,
        }

    def _schedule(self) -> list[int]:
        before = len(self._scheduler.running)
        parts = self._scheduler.schedule()
        running = self._scheduler.running
        longest = max(sequence.length for sequence in running)
        self._resize(*self._cache.size_for(len(running), longest))
        for sequence in running[before:]:
            if sequence.request.adapter is not None:
                self._lora.hold(sequence.request.adapter)
            self._join(sequence)
        entering = running[len(running) - len(parts) :]
        return [min(part, one.missing) for part, one in zip(parts, entering, strict=True)]

    def _resize(self, rows: int, length: int) -> None:
        for copy in self._rows.resize(rows, length):
            self._cache.copy(copy)
        self._cache.resize(rows, length)

    def _join(self, sequence: Sequence) -> None:
        """Of a prompt that begins like what is in the cache, only the rest enters."""
        copy = self._rows.join(sequence)
        if copy is None:
            return
        if copy.source != copy.target:
            self._cache.copy(copy)
        sequence.cached = copy.length
        self._reused += copy.length

    def _run(self, parts: list[int]) -> Tensor:
        running = self._scheduler.running
        batch = FlatBatch.of(running, parts)
        logits = self._model.forward(batch, self._cache, self._lora, self._route(batch))
        for sequence, part in zip(running[batch.decoding :], parts, strict=True):
            sequence.cached += part
        return logits

    def _route(self, batch: FlatBatch) -> Routes:
        adapters = [sequence.request.adapter for sequence in self._scheduler.running]
        prompts = zip(adapters[batch.decoding :], batch.prompts, strict=True)
        return self._lora.route(
            adapters[: batch.decoding],
            [(adapter, prompt.start, prompt.stop) for adapter, prompt in prompts],
        )

    def _postprocess(self, logits: Tensor) -> StepResult:
        running = self._scheduler.running[: len(logits)]
        requests = [sequence.request for sequence in running]
        highest, tokens = sampler.choose(
            logits,
            [request.temperature for request in requests],
            [request.top_p for request in requests],
            [sequence.draws.random() for sequence in running],
        )
        result = StepResult()
        for sequence, token, top in zip(running, tokens, highest, strict=True):
            if math.isfinite(top):
                self._take(sequence, token, result)
            else:
                result.failed.append((sequence.id, "the model's output is not finite"))
                self._clear(sequence.row)
                self._end(sequence)
        self._steps += 1
        self._generated += len(result.tokens)
        return result

    def _take(self, sequence: Sequence, token: int, result: StepResult) -> None:
        kept = len(sequence.generated)
        if not kept:
            self._rows.hold(sequence)
        reason = sequence.append(token)
        if len(sequence.generated) > kept:
            result.tokens.append((sequence.id, token))
        if reason is not None:
            result.finished.append((sequence.id, reason))
            self._rows.hold(sequence)
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self._scheduler.release(sequence)
        self._rows.leave(sequence)
        if sequence.request.adapter is not None:
            self._lora.release(sequence.request.adapter)

    def _clear(self, row: int) -> None:
        self._cache.clear(row)
        self._rows.forget_row(row)

    def _refuse_while_used(self, adapter: str) -> None:
        users = sum(sequence.request.adapter == adapter for sequence in self._sequences.values())
        if users:
            raise AdapterRefused(f"{users} requests are using the adapter")
