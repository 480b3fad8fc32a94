"""Embeddings of OpenAI's API: texts or token ids as they are, without a chat template."""

from typing import Annotated, Literal

from pydantic import Field

from tuneship.contract.common import Reply
from tuneship.contract.declaring.examples import MODEL
from tuneship.contract.declaring.operation import Example
from tuneship.contract.embeddings import Dimensions, EmbeddedTexts, Pooled
from tuneship.contract.openai.answer_parts import AskedModel, AskingUser
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.request_fields import OpenAIRequest


class EmbeddingsCreate(OpenAIRequest):
    """Texts whose embeddings are wanted. `pooling` is tuneship's own field."""

    model: AskedModel
    input: EmbeddedTexts
    encoding_format: Annotated[
        Literal["float", "base64"],
        Field(description="A list of numbers, or float32 numbers (little-endian) in Base64."),
    ] = "float"
    dimensions: Dimensions = None
    pooling: Pooled = "mean"
    user: AskingUser = None


class EmbeddingItem(Reply):
    """The embedding of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Reply):
    """Tokens that the model read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Reply):
    """The embeddings of all texts, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: Annotated[str, Field(description="The model that answered, also for an endpoint.")]
    usage: EmbeddingUsage


@openai_operation(
    "POST",
    "embeddings",
    scope="generate",
    example=Example(
        {
            "text": {"model": MODEL, "input": "senile cataract"},
            "texts": {
                "model": MODEL,
                "input": ["senile cataract", "asthma"],
                "encoding_format": "base64",
                "dimensions": 64,
            },
        },
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5, 0.1, 0.7]}],
            "model": MODEL,
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        },
    ),
)
def openai_create_embeddings(request: EmbeddingsCreate) -> EmbeddingList:
    """Embed texts with the hidden states of a base model or a tuned one.

    A model that no deployment serves gets one, for a key with `deployments:write`.
    """
    raise NotImplementedError
