"""Text generation on the wire (§2.6, §4.7), for deployments and for endpoints."""

from typing import Annotated

from pydantic import Field

from tuneship.contract.common import AnyEndpointId, CreateRequest, DeploymentId, Reply
from tuneship.contract.operation import operation


class Generate(CreateRequest):
    """What to generate. Absent settings come from the deployment's `model_config`."""

    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, description="0 is greedy.")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] = Field(
        default_factory=list[str], description="Texts that end the completion; they are cut off."
    )
    seed: Annotated[int | None, Field(ge=0, le=2**63 - 1)] = None


class Usage(Reply):
    """Tokens the model read (template included) and wrote (end token excluded)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Generation(Reply):
    """A completion; `deployment_id` says who served it."""

    id: str
    deployment_id: str
    prompt: str
    completion: str
    finish_reason: str
    usage: Usage


@operation("POST", "/v1/deployments/{deployment_id}/generate", scope="generate")
def generate(deployment_id: DeploymentId, request: Generate) -> Generation:
    """Generate with one deployment (§4.7)."""
    raise NotImplementedError


@operation("POST", "/v1/endpoints/{endpoint_id}/generate", scope="generate")
def generate_by_endpoint(endpoint_id: AnyEndpointId, request: Generate) -> Generation:
    """Generate through an endpoint; a canary endpoint draws the deployment by its split (§4.6)."""
    raise NotImplementedError
