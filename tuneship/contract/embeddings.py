"""Embeddings of texts (additive), for deployments and for endpoints."""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from tuneship.contract.common import AnyEndpointId, CreateRequest, DeploymentId, Reply
from tuneship.contract.declaring.examples import CANDIDATE
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.errors import DeploymentError, InvalidRequestError
from tuneship.contract.generation import EXAMPLE_PROMPT, Usage
from tuneship.contract.token_inputs import TextOrIds, schema_of_texts, texts_or_ids

# The limits of OpenAI's API for one request.
MAXIMUM_TEXTS = 2048
MAXIMUM_TOKENS = 300_000


def _texts(value: object) -> list[TextOrIds]:
    texts = texts_or_ids(value, "input")
    if len(texts) > MAXIMUM_TEXTS:
        context = {"param": "input", "most": MAXIMUM_TEXTS}
        raise PydanticCustomError("too_long", "must hold at most {most} texts", context)
    return texts


EmbeddedTexts = Annotated[
    list[TextOrIds],
    PlainValidator(_texts),
    WithJsonSchema(
        schema_of_texts(
            MAXIMUM_TEXTS,
            f"One text or several, as texts or token ids, of {MAXIMUM_TOKENS} tokens at most. No template is added.",
        )
    ),
]
PoolingName = Literal["mean", "last"]
Pooled = Annotated[
    PoolingName,
    Field(
        description="What becomes the vector: the mean of all tokens' hidden states, or the state of the last token."
    ),
]
Dimensions = Annotated[
    int | None,
    Field(
        ge=1,
        description="Keep this many numbers of each vector, from the first on, and make its length 1 again. At most "
        "the hidden size of the model, which is the default.",
    ),
]


class Embed(CreateRequest):
    """Texts whose embeddings are wanted."""

    input: EmbeddedTexts
    pooling: Pooled = "mean"
    dimensions: Dimensions = None


class Embeddings(Reply):
    """A vector of length 1 for each text, in the order of the texts, and the deployment that computed them.

    They are the hidden states of the model after its final norm. Compare only vectors of one model and one pooling.
    """

    deployment_id: str
    embeddings: list[list[float]]
    usage: Usage


EXAMPLE = Example(
    {
        "text": {"input": EXAMPLE_PROMPT},
        "texts": {"input": ["senile cataract", "asthma"], "pooling": "last", "dimensions": 4},
    },
    {
        "deployment_id": CANDIDATE,
        "embeddings": [[0.5, -0.5, 0.1, 0.7]],
        "usage": {"prompt_tokens": 12, "completion_tokens": 0, "total_tokens": 12},
    },
)


@operation(
    "POST",
    "/v1/deployments/{deployment_id}/embeddings",
    scope="generate",
    errors=(DeploymentError, (DeploymentError, 503)),
    example=EXAMPLE,
)
def embed(deployment_id: DeploymentId, request: Embed) -> Embeddings:
    """Embed texts with one deployment (additive): with its base model and its adapter.

    It counts in the rate limit of generations, and in no metric as an empty answer.
    """
    raise NotImplementedError


@operation(
    "POST",
    "/v1/endpoints/{endpoint_id}/embeddings",
    scope="generate",
    errors=(DeploymentError, (DeploymentError, 503), (InvalidRequestError, 409)),
    headers=("X-Routing-Key",),
    example=EXAMPLE,
)
def embed_by_endpoint(endpoint_id: AnyEndpointId, request: Embed) -> Embeddings:
    """Embed texts through an endpoint (additive); a canary endpoint draws the deployment by its split."""
    raise NotImplementedError
