"""Parts of requests for answers, and of the answers, that several operations share."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import Reply
from tuneship.contract.generation import MAXIMUM_ANSWERS, SchemaOfAnswer
from tuneship.contract.openai.request_fields import NeutralFields, OpenAIRequest
from tuneship.contract.schemas.tools import NAME_PATTERN, Strict

Text = Annotated[str, Field(min_length=1)]
# A model, or what stands for one: a deployment, or an endpoint by its id or its name.
AskedModel = Annotated[str, Field(min_length=1, max_length=512)]
AskingUser = Annotated[
    str | None,
    Field(description="Requests of one user go to one member of a canary endpoint."),
]
# The fields that take effect only together with a part of the engine that is not there yet.
PENALTIES: NeutralFields = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}


SchemaName = Annotated[str, Field(pattern=NAME_PATTERN, description="Has no effect on the answer.")]
SchemaDescription = Annotated[
    str | None, Field(description="Has no effect here: the model does not read the schema.")
]


class TextPart(OpenAIRequest):
    """One part of a turn: text, or what an assistant has refused with."""

    type: Any
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _text_of_its_type(self) -> Self:
        needed, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, needed) is None:
            raise PydanticCustomError("missing", "is required", {"below": f".{needed}"})
        if getattr(self, other) is not None:
            raise PydanticCustomError("conflict", "is of another type", {"below": f".{other}"})
        return self

    @property
    def written(self) -> str:
        """Its text."""
        return self.text or self.refusal or ""


def text_of_parts(content: str | Sequence[TextPart] | None) -> str:
    """A content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.written for part in content)


class NamedSchema(OpenAIRequest):
    """A schema that the answer must fit."""

    name: SchemaName
    description: SchemaDescription = None
    json_schema: Annotated[SchemaOfAnswer, Field(alias="schema")]
    strict: Strict = None


def refuse_other_fields(kind: str, given: dict[str, object], needed: tuple[str, ...]) -> None:
    """Raise pydantic's error unless a `json_schema` has what it needs, and no other format has any of it."""
    for name, value in given.items():
        if kind == "json_schema" and name in needed and value is None:
            raise PydanticCustomError("missing", "is required", {"below": f".{name}"})
        if kind != "json_schema" and value is not None:
            text = "needs the type json_schema"
            raise PydanticCustomError("conflict", text, {"below": f".{name}"})


def main_format(kind: str, schema: dict[str, Any] | None, *, is_flexible: bool) -> dict[str, Any]:
    """The form of an answer as the main API takes it."""
    return {"type": kind, "schema": schema, "whitespace_flexible": is_flexible}


class StreamOptions(OpenAIRequest):
    """Options of a stream."""

    neutral: ClassVar[NeutralFields] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class SampledRequest(OpenAIRequest):
    """How to sample an answer, where to stop, and whether to stream it."""

    model: AskedModel
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAXIMUM_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: AskingUser = None

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def person(self) -> str | None:
        """The text that stands for the person who asks."""
        return self.user

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the numbers of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionUsage(Reply):
    """Tokens that the model read and wrote."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answered(Reply):
    """The fields that every answer and every piece of a stream has."""

    id: str
    created: int
    model: Annotated[str, Field(description="The model that answered, also for an endpoint.")]
    system_fingerprint: str | None = None


FinishReason = Literal["stop", "length", "tool_calls"]
