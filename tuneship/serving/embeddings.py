"""Embeddings: the hidden states of a text's tokens after the final norm, pooled to one vector of length 1.

A pass takes as many tokens as a step may prefill, so that the sequences that decode between two passes wait no longer
than for a prefill. It has a KV cache of its own and leaves the prefixes of generations alone. Requests in the
background have small passes while no other texts wait, and beside sequences only every few steps.
"""

import base64
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from tuneship.serving.batch import FlatBatch
from tuneship.serving.embed_request import EmbedRequest, Pooling
from tuneship.serving.engine import Engine, RequestRefused, SequenceTooLarge
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.sequence import GenerateRequest, Sequence

# Between two passes over texts in the background, sequences have so many steps to themselves.
STEPS_BETWEEN_BACKGROUND_PASSES = 8
# Part of a pass that one in the background may have: whoever comes meanwhile waits for its end.
BACKGROUND_PASS_SHARE = 1 / 8
NOT_FINITE = "the model's output is not finite"


@dataclass(slots=True, eq=False)
class _Job:
    """One request and its progress."""

    id: str
    request: EmbedRequest
    # Texts that have no vector yet.
    left: int
    # Texts that are or were in a pass; the others wait.
    begun: int = 0


# Jobs by owner.
_Queues = OrderedDict[str, deque[_Job]]


@dataclass(slots=True, eq=False)
class _Text:
    """One text of a pass, or the part of a long one that has been read."""

    job: _Job
    number: int
    sequence: Sequence
    # Sum of the hidden states so far, or the newest one [hidden size].
    pooled: Tensor | None = None

    def take(self, states: Tensor) -> None:
        """Pool the hidden states [chunk, hidden size] of its next tokens."""
        self.sequence.cached += len(states)
        if self.job.request.pooling is Pooling.LAST:
            self.pooled = states[-1]
        else:
            total = states.sum(0)
            self.pooled = total if self.pooled is None else self.pooled + total

    def vector(self) -> Tensor:
        """The embedding [dimensions]. The length is made 1, so a sum has the direction of the mean."""
        if self.pooled is None:
            raise ValueError("no state of the text was pooled")
        return F.normalize(self.pooled[: self.job.request.dimensions], dim=0)


@dataclass(slots=True)
class PassResult:
    """The outcome of one pass."""

    # Request id, number of the text, and its vector as float32 numbers in Base64.
    vectors: list[tuple[str, int, str]] = field(default_factory=list)
    # Request id and error message.
    failed: list[tuple[str, str]] = field(default_factory=list)


class Embedder:
    """The waiting texts to embed, and the passes over them."""

    def __init__(self, engine: Engine) -> None:
        """Share the engine's model and adapters; a requested adapter stays loaded during the request."""
        self._model = engine.model
        self._lora = engine.lora
        self._pass_tokens = engine.limits.prompt_tokens
        facts, cache_bytes = engine.model.facts, engine.limits.cache_bytes
        self._text_tokens = facts.context_length
        if cache_bytes is not None:
            self._text_tokens = min(self._text_tokens, cache_bytes // facts.cache.token_bytes)
        self._jobs: dict[str, _Job] = {}
        # Jobs with waiting texts, by owner, in the order of their turns.
        self._queues: _Queues = OrderedDict()
        # Those in the background.
        self._background: _Queues = OrderedDict()
        # Steps of the sequences since the last pass.
        self._steps_alone = 0
        # A text that is longer than a pass.
        self._unfinished: _Text | None = None
        # The keys and values of the unfinished text.
        self._cache: SlotCache | None = None

    @property
    def idle(self) -> bool:
        """Whether no text waits."""
        return not self._jobs

    @property
    def requests(self) -> list[str]:
        """Ids of all requests in flight."""
        return list(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of requests without a text in a pass yet."""
        return sum(not job.begun for job in self._jobs.values())

    def submit(self, identifier: str, request: EmbedRequest) -> None:
        """Queue a request. Raises `RequestRefused`."""
        facts = self._model.facts
        if identifier in self._jobs:
            raise RequestRefused("a request with this id is in flight already")
        if request.adapter is not None and request.adapter not in self._lora:
            raise RequestRefused("no adapter of this name is loaded")
        if not request.texts or not all(request.texts):
            raise RequestRefused("there is no text, or an empty one")
        longest = max(map(len, request.texts))
        if longest > facts.context_length:
            raise RequestRefused(f"{longest} tokens, the context holds {facts.context_length}")
        if longest > self._text_tokens:
            text = f"{longest} tokens of a text, the memory for them holds {self._text_tokens}"
            raise SequenceTooLarge(text)
        lowest, highest = min(map(min, request.texts)), max(map(max, request.texts))
        if lowest < 0 or highest >= facts.vocabulary:
            raise RequestRefused("a token is not in the vocabulary")
        if request.dimensions is not None and not 1 <= request.dimensions <= facts.hidden_size:
            raise RequestRefused(f"dimensions must be from 1 to {facts.hidden_size}")
        if request.adapter is not None:
            self._lora.acquire(request.adapter)
        job = self._jobs[identifier] = _Job(identifier, request, len(request.texts))
        self._queues_beside(job).setdefault(request.owner, deque()).append(job)

    def cancel(self, identifier: str) -> None:
        """Drop a request; an unknown id belongs to one that has ended already."""
        job = self._jobs.get(identifier)
        if job is None:
            return
        if self._unfinished is not None and self._unfinished.job is job:
            self._unfinished = self._cache = None
        self._end(job)

    @torch.inference_mode()
    def step(self, *, is_beside_sequences: bool = False) -> PassResult:
        """Run one pass, if a text waits; `is_beside_sequences`: after a step of sequences."""
        if is_beside_sequences and not self._queues and self._is_in_background:
            self._steps_alone += 1
            if self._steps_alone < STEPS_BETWEEN_BACKGROUND_PASSES:
                return PassResult()
        self._steps_alone = 0
        texts = self._choose()
        if not texts:
            return PassResult()
        most = self._tokens_of_a_pass(is_background=texts[0].job.request.is_background)
        chunks = [min(most, text.sequence.uncached) for text in texts]
        batch = FlatBatch.of([text.sequence for text in texts], chunks)
        adapters = [text.job.request.adapter for text in texts]
        routes = self._lora.route(
            [],
            [
                (adapter, prefill.start, prefill.stop)
                for adapter, prefill in zip(adapters, batch.prefills, strict=True)
            ],
        )
        longest = max(len(one.sequence.request.tokens) for one in texts)
        cache = self._cache or SlotCache.of_one(self._model.facts.cache, longest)
        states = self._model.hidden(batch, cache, self._lora, routes)
        for text, chunk in zip(texts, states.split(chunks), strict=True):
            text.take(chunk)
        # Only a text that is alone in its passes may be unfinished.
        is_finished = not texts[0].sequence.is_prefilling
        self._unfinished, self._cache = (None, None) if is_finished else (texts[0], cache)
        return self._finish(texts) if is_finished else PassResult()

    @property
    def _is_in_background(self) -> bool:
        """Whether the texts of the next pass, if there are any, are background work."""
        return self._unfinished is None or self._unfinished.job.request.is_background

    def _tokens_of_a_pass(self, *, is_background: bool) -> int:
        share = BACKGROUND_PASS_SHARE if is_background else 1
        return max(1, int(share * self._pass_tokens))

    def _queues_beside(self, job: _Job) -> _Queues:
        return self._background if job.request.is_background else self._queues

    def _choose(self) -> list[_Text]:
        """Choose the texts of the next pass, grouped by adapter.

        A text that is longer than a pass is alone in its passes, and nothing comes between them.
        """
        if self._unfinished is not None:
            return [self._unfinished]
        chosen: list[_Text] = []
        queues = self._queues or self._background
        room = self._tokens_of_a_pass(is_background=not self._queues)
        for owner, queue in list(queues.items()):
            for text in self._waiting_of(queue):
                length = len(text.sequence.request.tokens)
                if chosen and length > room:
                    break
                room -= length
                chosen.append(text)
                text.job.begun += 1
                queues.move_to_end(owner)  # the others have their turns first
            while queue and queue[0].begun == len(queue[0].request.texts):
                queue.popleft()
            if not queue:
                del queues[owner]
        chosen.sort(key=lambda text: text.job.request.adapter or "")
        return chosen

    def _waiting_of(self, queue: deque[_Job]) -> Iterator[_Text]:
        """Yield the texts of an owner that were in no pass yet."""
        for job in queue:
            for number in range(job.begun, len(job.request.texts)):
                prompt = GenerateRequest(job.request.texts[number], 0, job.request.adapter, seed=0)
                # All texts of a pass share slot 0: only a text that is alone in its passes reads what it stores.
                yield _Text(job, number, Sequence(job.id, prompt, token_limit=0, slot=0))

    def _finish(self, texts: list[_Text]) -> PassResult:
        result = PassResult()
        for text in texts:
            job = text.job
            if job.id not in self._jobs:  # another of its texts has just failed
                continue
            vector = text.vector()
            if not bool(vector.isfinite().all()):
                result.failed.append((job.id, NOT_FINITE))
                self._end(job)
                continue
            content = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
            result.vectors.append((job.id, text.number, content))
            job.left -= 1
            if not job.left:
                self._end(job)
        return result

    def _end(self, job: _Job) -> None:
        del self._jobs[job.id]
        queues = self._queues_beside(job)
        queue = queues.get(job.request.owner)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del queues[job.request.owner]
        if job.request.adapter is not None:
            self._lora.release(job.request.adapter)
