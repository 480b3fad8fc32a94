"""Models of OpenAI's API: base models, tuned ones, and the endpoints that stand for a model."""

from typing import Annotated, Literal

from pydantic import Field

from tuneship.contract.common import ModelId, Reply
from tuneship.contract.declaring.examples import MODEL
from tuneship.contract.declaring.operation import Example
from tuneship.contract.openai.declaring import openai_operation

ShownModelId = Annotated[ModelId, Field(description="A model, or the name of an endpoint.")]


class ModelObject(Reply):
    """Something that answers under this id; `created` is 0 for a base model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Annotated[str, Field(description="`tuneship` for a base model, else the client.")]


class ModelObjects(Reply):
    """All models on one page."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class ModelDeleted(Reply):
    """The answer to a delete."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


EXAMPLE_MODEL = {"id": MODEL, "object": "model", "created": 1_772_366_400, "owned_by": "radiology"}


@openai_operation(
    "GET",
    "models",
    scope="models:read",
    example=Example(reply={"object": "list", "data": [EXAMPLE_MODEL]}),
)
def openai_list_models() -> ModelObjects:
    """List base models, tuned models and endpoints."""
    raise NotImplementedError


@openai_operation(
    "GET", "models/{model_id:path}", scope="models:read", example=Example(reply=EXAMPLE_MODEL)
)
def openai_get_model(model_id: ShownModelId) -> ModelObject:
    """Fetch one model, or the endpoint of this name."""
    raise NotImplementedError


@openai_operation(
    "DELETE",
    "models/{model_id:path}",
    scope="models:write",
    changes=True,
    example=Example(reply={"id": MODEL, "object": "model", "deleted": True}),
)
def openai_delete_model(model_id: ShownModelId) -> ModelDeleted:
    """Delete a tuned model and its files; one that a deployment names is kept.

    A deployment that was made for its name goes with it, for a key with `deployments:write`.
    """
    raise NotImplementedError
