"""Embeddings: what answers, the run of the main API's embedding, and the handler."""

import time

from tuneship.contract.embeddings import Embed
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
from tuneship.service.openai.openai_run import OpenAIRun


@serves_openai(contract.openai_create_embeddings)
async def openai_create_embeddings(context: Context, request: EmbeddingsCreate) -> bytes:
    """Embed the texts."""
    begun = await embeddings_run(context, request)
    return await begun.run.answer_as(begun.reply)


async def embeddings_run(context: Context, request: EmbeddingsCreate) -> OpenAIRun[bytes]:
    """The run that embeds texts."""
    started = time.perf_counter()
    answerer = await answerer_of(context, request.model, request.user)
    # The texts were read and checked with this request.
    wanted = Embed.model_construct(
        input=request.input, pooling=request.pooling, dimensions=request.dimensions
    )
    run = embedding_run(context, answerer.target, wanted, started)

    def reply() -> bytes:
        is_base64, usage = request.encoding_format == "base64", run.usage
        items = [
            EmbeddingItem(index=index, embedding=vector if is_base64 else numbers_of(vector))
            for index, vector in enumerate(run.vectors)
        ]
        used = EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
        answer = EmbeddingList(data=items, model=answerer.model, usage=used)
        return answer.model_dump_json().encode()

    return OpenAIRun(run, reply)
