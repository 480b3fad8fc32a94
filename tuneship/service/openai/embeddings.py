"""Handler of embeddings: it finds what answers, and runs the embedding of the main API."""

import time
from collections.abc import Sequence

from tuneship.contract.embeddings import Embed
from tuneship.contract.generation import Usage
from tuneship.contract.openai import embeddings as contract
from tuneship.contract.openai.embeddings import (
    EmbeddingItem,
    EmbeddingList,
    EmbeddingsCreate,
    EmbeddingUsage,
)
from tuneship.service.context.context import Context
from tuneship.service.generation.drills import embedding_run
from tuneship.service.generation.embedding_run import numbers_of
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.model_lookup import answerer_of


@serves_openai(contract.openai_create_embeddings)
async def openai_create_embeddings(context: Context, request: EmbeddingsCreate) -> bytes:
    """Embed the texts."""
    started = time.perf_counter()
    answerer = await answerer_of(context, request.model, request.user)
    # The texts were read and checked with this request.
    wanted = Embed.model_construct(
        input=request.input, pooling=request.pooling, dimensions=request.dimensions
    )
    run = embedding_run(context, answerer.target, wanted, started)
    vectors = await run.vectors()
    return await context.parts.threads.texts.run(
        context.client_id, _as_json, request, answerer.model, vectors, run.usage
    )


def _as_json(request: EmbeddingsCreate, model: str, vectors: Sequence[str], usage: Usage) -> bytes:
    is_base64 = request.encoding_format == "base64"
    items = [
        EmbeddingItem(index=index, embedding=vector if is_base64 else numbers_of(vector))
        for index, vector in enumerate(vectors)
    ]
    used = EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
    return EmbeddingList(data=items, model=model, usage=used).model_dump_json().encode()
