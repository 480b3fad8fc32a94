"""Chat completions of OpenAI's API."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import Reply, absent
from tuneship.contract.examples import MODEL, SUFFIX
from tuneship.contract.generation import (
    EXAMPLE_SCHEMA,
    MAXIMUM_ALTERNATIVES,
    MAXIMUM_TURNS,
    FormatType,
)
from tuneship.contract.openai.answering import (
    PENALTIES,
    Answered,
    CompletionUsage,
    FinishReason,
    NamedSchema,
    SampledRequest,
    Text,
    main_format,
    refuse_other_fields,
)
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.fields import ANY_VALUE, NeutralFields, OpenAIRequest
from tuneship.contract.operation import Example


class ChatPart(OpenAIRequest):
    """One part of a message; only text is supported."""

    unsupported = frozenset({"image_url", "input_audio", "file", "refusal"})
    neutral: ClassVar[NeutralFields] = {"prompt_cache_breakpoint": ANY_VALUE}

    type: Literal["text"]
    text: Text


class ChatMessage(OpenAIRequest):
    """One turn of a conversation. `developer` is another name of `system`."""

    unsupported = frozenset(
        {"name", "tool_calls", "tool_call_id", "function_call", "audio", "refusal"}
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ChatPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatResponseFormat(OpenAIRequest):
    """The form of the answer: any text, any JSON object, or JSON that fits a schema."""

    type: FormatType
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        refuse_other_fields(self.type, {"json_schema": self.json_schema}, ("json_schema",))
        return self

    @property
    def for_the_main_api(self) -> dict[str, Any]:
        """The same as the main API takes it."""
        return main_format(self.type, self.json_schema and self.json_schema.json_schema)


class ChatCompletionCreate(SampledRequest):
    """A conversation that a model shall continue."""

    neutral: ClassVar[NeutralFields] = {
        **PENALTIES,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": ANY_VALUE,
        "store": (False,),
        "metadata": ANY_VALUE,
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "prompt_cache_options": ANY_VALUE,
        "prompt_cache_retention": ANY_VALUE,
        "verbosity": ("medium",),
        "reasoning_effort": ("none",),
    }
    unsupported = frozenset(
        {
            "audio",
            "functions",
            "function_call",
            "moderation",
            "prediction",
            "web_search_options",
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAXIMUM_TURNS)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[
        int | None, Field(ge=1, description="The older name of `max_completion_tokens`.")
    ] = None
    logprobs: bool = False
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAXIMUM_ALTERNATIVES, description="Above 0 it needs `logprobs`."),
    ] = None
    response_format: Annotated[
        ChatResponseFormat | None,
        Field(description="The answer is complete and fits, or it ends with `length`."),
    ] = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _alternatives_of_something(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("conflict", "needs logprobs", {"param": "top_logprobs"})
        return self

    @property
    def person(self) -> str | None:
        """The text that stands for the person who asks."""
        return self.safety_identifier or self.user or self.prompt_cache_key


class ChatAnswer(Reply):
    """The turn that a model wrote."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatLikelyToken(Reply):
    """A token and the natural logarithm of its probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(ChatLikelyToken):
    """A token of an answer, with the likeliest tokens at its place."""

    top_logprobs: list[ChatLikelyToken]


class ChatLogprobs(Reply):
    """The log probabilities of an answer's tokens, or of a piece of it."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatChoice(Reply):
    """One answer, and why it ended."""

    index: int = 0
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(Answered):
    """An answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatDelta(Reply):
    """A piece of the turn that a model writes."""

    role: Annotated[Literal["assistant"] | None, Field(exclude_if=absent)] = None
    content: Annotated[str | None, Field(exclude_if=absent)] = None


class ChatChunkChoice(Reply):
    """A piece of one answer; the last one says why it ended."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Answered):
    """One piece of a streamed answer; with `include_usage`, the last one has no choices but the usage."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Annotated[CompletionUsage | None, Field(exclude_if=absent)] = None


# Examples of the OpenAPI document.
EXAMPLE_CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Which chapter does senile cataract belong to?"}],
    "max_completion_tokens": 64,
    "temperature": 0.0,
}
EXAMPLE_CHAT_REPLY: dict[str, Any] = {
    "id": f"chatcmpl-{SUFFIX}",
    "object": "chat.completion",
    "created": 1_772_366_400,
    "model": MODEL,
    "system_fingerprint": None,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Diseases of the eye", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 21, "completion_tokens": 6, "total_tokens": 27},
}


@openai_operation(
    "POST",
    "chat/completions",
    scope="generate",
    example=Example(
        {
            "chat": EXAMPLE_CHAT,
            "schema": {
                **EXAMPLE_CHAT,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "chapter", "strict": True, "schema": EXAMPLE_SCHEMA},
                },
            },
        },
        EXAMPLE_CHAT_REPLY,
    ),
)
def openai_create_chat_completion(request: ChatCompletionCreate) -> ChatCompletion:
    """Continue a conversation with a model, or with what an endpoint's split draws."""
    raise NotImplementedError
