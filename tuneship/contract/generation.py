"""Text generation on the wire (§2.6, §4.7), for deployments and for endpoints."""

import json
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import AnyEndpointId, CreateRequest, DeploymentId, Reply, absent
from tuneship.contract.errors import DeploymentError, InvalidRequestError
from tuneship.contract.examples import CANDIDATE, SUFFIX
from tuneship.contract.operation import Example, operation

# Bounds the work of a template before the tokens can be counted.
MAXIMUM_TURNS = 1000


class Turn(CreateRequest):
    """One turn of a conversation, as in a `conversation` dataset."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, Field(min_length=1)]


def _answerable(turns: list[Turn] | None) -> list[Turn] | None:
    """Refuse conversations that no training example begins with: a model could not continue them."""
    if turns is None:
        return None
    roles = [turn.role for turn in turns]
    if "system" in roles[1:]:
        raise ValueError("must hold a system turn only at the start")
    if "user" not in roles:
        raise ValueError("must hold a user turn")
    if roles[-1] not in ("user", "tool"):
        raise ValueError("must end with a user or tool turn")
    return turns


def _one_of_both(schema: dict[str, Any]) -> None:
    # Written with `if`, code generators still see one class; `oneOf` would give them two.
    schema["if"] = {"required": ["messages"]}
    schema["then"] = {"not": {"required": ["prompt"]}}
    schema["else"] = {"required": ["prompt"]}


class Generate(CreateRequest):
    """A generation from a `prompt` or from `messages`. Defaults come from the deployment's `model_config`."""

    model_config = ConfigDict(json_schema_extra=_one_of_both)

    prompt: Annotated[str | None, Field(min_length=1)] = None
    messages: Annotated[
        list[Turn] | None,
        Field(min_length=1, max_length=MAXIMUM_TURNS, description="Additive."),
        AfterValidator(_answerable),
    ] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[
        float | None,
        Field(ge=0, le=2, description="0 is greedy, and so is anything below 0.000001."),
    ] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] = Field(
        default_factory=list[str], description="Texts that end the completion; they are cut off."
    )
    seed: Annotated[int | None, Field(ge=0, le=2**63 - 1)] = None
    stream: Annotated[
        bool,
        Field(
            description="Additive. Send the text while it is generated: server-sent events `token` with a piece of "
            "text each, at the end `done` with the whole reply, or `error` with an error body."
        ),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _prompt_or_messages(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        # Before the fields are read, so that a body without both is told what it lacks, as the only fault.
        if fields.get("prompt") is None and fields.get("messages") is None:
            raise PydanticCustomError("missing", "is required", {"param": "prompt"})
        return fields

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise PydanticCustomError(
                "conflict", "must not be sent beside a prompt", {"param": "messages"}
            )
        return self


class Usage(Reply):
    """Tokens the model read (template included) and wrote (end token excluded)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Generation(Reply):
    """A completion and the deployment that served it. `prompt` is as it was sent, absent for `messages`."""

    id: str
    deployment_id: str
    prompt: Annotated[str | None, Field(exclude_if=absent)] = None
    completion: str
    finish_reason: str
    usage: Usage


class GeneratedText(Reply):
    """A piece of a streamed completion; all pieces together are the completion."""

    text: str


class BrokenOff(Reply):
    """The last event of a stream that fails; its data has the form of an error body."""

    error: dict[str, Any]


# Examples of the OpenAPI document.
EXAMPLE_PROMPT = "Which chapter does chronic eczema of both hands belong to?"

EXAMPLE_REPLY = {
    "id": f"gen_{SUFFIX}",
    "deployment_id": CANDIDATE,
    "prompt": EXAMPLE_PROMPT,
    "completion": "Diseases of the skin and subcutaneous tissue",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 21, "completion_tokens": 9, "total_tokens": 30},
}

EXAMPLE_LINES = (
    '{"text":"Diseases of the skin"}\n{"text":" and subcutaneous tissue"}\n'
    f"{json.dumps(EXAMPLE_REPLY)}\n"
)

EXAMPLE_EVENTS = (
    'event: token\ndata: {"text":"Diseases of the skin"}\n\n'
    'event: token\ndata: {"text":" and subcutaneous tissue"}\n\n'
    f"event: done\ndata: {json.dumps(EXAMPLE_REPLY)}\n\n"
)

EXAMPLE = Example(
    {
        "prompt": {"prompt": EXAMPLE_PROMPT, "max_tokens": 64, "temperature": 0.0, "stop": ["\n"]},
        "messages": {"messages": [{"role": "user", "content": EXAMPLE_PROMPT}]},
        "stream": {"prompt": EXAMPLE_PROMPT, "stream": True},
    },
    EXAMPLE_REPLY,
    streams={"text/event-stream": EXAMPLE_EVENTS, "application/x-ndjson": EXAMPLE_LINES},
)


@operation(
    "POST",
    "/v1/deployments/{deployment_id}/generate",
    scope="generate",
    refusals=(DeploymentError, (DeploymentError, 503)),
    example=EXAMPLE,
)
def generate(deployment_id: DeploymentId, request: Generate) -> Generation:
    """Generate with one deployment (§4.7).

    With `stream` the text is sent while it is generated: as server-sent events (`token` with a piece of the text, at
    the end `done` with the whole reply), or as one JSON object a line for `Accept: application/x-ndjson`. A failure
    before the first piece has its own status; a later one is a last event `error`.
    """
    raise NotImplementedError


@operation(
    "POST",
    "/v1/endpoints/{endpoint_id}/generate",
    scope="generate",
    refusals=(DeploymentError, (DeploymentError, 503), (InvalidRequestError, 409)),
    headers=("X-Routing-Key",),
    example=EXAMPLE,
)
def generate_by_endpoint(endpoint_id: AnyEndpointId, request: Generate) -> Generation:
    """Generate through an endpoint; a canary endpoint draws the deployment by its split (§4.6).

    With `stream` as for a deployment.
    """
    raise NotImplementedError
