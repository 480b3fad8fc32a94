"""One request for embeddings, from the choice of its deployment's model to the recorded vectors.

Next: `routed_run.py` (what generations share), `prompts.py` (the tokens of a text).
"""

from array import array
from base64 import b64decode

from tuneship.contract.embeddings import MAXIMUM_TOKENS, Embed
from tuneship.contract.errors import ErrorDetail, InvalidRequestError
from tuneship.contract.generation import Usage
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.context import Context
from tuneship.service.generation.prompts import (
    LONG_PROMPT_CHARACTERS,
    PromptTooLong,
    owner_of,
    raw_tokens,
)
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.service.generation.routing import RoutingTarget
from tuneship.service.generation.span import note_embedding
from tuneship.serving.embed_request import Pooling
from tuneship.serving.replica_client import EmbedRequest, ReplicaLost


class EmbeddingRun(RoutedRun):
    """One request for embeddings."""

    work = "embedding"
    too_large_param = "input"
    # A vector for each text, as float32 numbers in Base64, known after `answer` has returned.
    vectors: list[str]
    # The tokens of the texts, known then, too.
    usage: Usage

    def __init__(
        self, context: Context, target: RoutingTarget, request: Embed, started: float
    ) -> None:
        """Begin with nothing but the request; `started` is when it came, by `time.perf_counter`."""
        super().__init__(context, target, started)
        self._request = request

    async def answer(self) -> None:
        async with self._accounted() as account:
            prepared = await self._tokenize()
            async with self._limited():
                # A text may be begun before others: the request waits until it has all its vectors.
                self._in_flight.queued(self._context.now)
                group = self._parts.replicas.of(self._served.base.path)
                try:
                    self.vectors = await group.embed(self._served.adapter, prepared)
                except ReplicaLost:  # another one may answer
                    self.vectors = await group.embed(self._served.adapter, prepared)
            tokens = sum(map(len, prepared.texts))
            account.embedded(len(prepared.texts), tokens)
            self._context.span.attributes["gen_ai.usage.input_tokens"] = tokens
        self.usage = Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)
        self._context.audit_facts.count(self.usage)

    def _is_long(self) -> bool:
        return True  # a million numbers take about a second

    def _note_request(self) -> None:
        note_embedding(self._context.span, self._target, self._served, self._request.dimensions)

    async def _tokenize(self) -> EmbedRequest:
        """Read the texts: on the event loop, or in a thread where that takes long. Raises `ValidationFailed`."""
        base, dimensions = self._served.base, self._request.dimensions
        if not base.engine.is_own:
            text = f"the engine of this base model, {base.engine.name}, computes no embeddings"
            details = [ErrorDetail(None, "unsupported_operation", text)]
            raise InvalidRequestError(text, details=details)
        if dimensions is not None and base.hidden_size is None:
            raise field_error(
                "dimensions", "is not supported for this base model", "unsupported_value"
            )
        if dimensions is not None and dimensions > (base.hidden_size or 0):
            text = f"must be at most {base.hidden_size}, the hidden size of the model"
            raise field_error("dimensions", text, "out_of_range")
        if base.is_read and sum(map(len, self._request.input)) <= LONG_PROMPT_CHARACTERS:
            return self._prepared()
        return await self._parts.threads.texts.run(self._context.client_id, self._prepared)

    def _prepared(self) -> EmbedRequest:
        request, base = self._request, self._served.base
        base.read()
        context_length: int = self._deployment["generation"]["context_length"]
        texts: list[tuple[int, ...]] = []
        for number, text in enumerate(request.input):
            param = "input" if len(request.input) == 1 else f"input[{number}]"
            tokens = raw_tokens(base, text, context_length, param)
            if len(tokens) > context_length:
                raise PromptTooLong(param, str(len(tokens)), context_length)
            texts.append(tuple(tokens))
        total = sum(map(len, texts))
        if total > MAXIMUM_TOKENS:
            text = f"has {total} tokens in all, one request may have {MAXIMUM_TOKENS}"
            raise field_error("input", text, "out_of_range")
        return EmbedRequest(
            texts=tuple(texts),
            adapter=None if self._served.adapter is None else self._served.adapter.name,
            pooling=Pooling(request.pooling),
            dimensions=request.dimensions,
            owner=owner_of(self._deployment),
            is_background=self._context.is_background,
        )


def numbers_of(vector: str) -> list[float]:
    """The numbers of a vector in Base64."""
    return array("f", b64decode(vector)).tolist()
