"""Chat completions of OpenAI's API."""

from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import Reply, absent
from tuneship.contract.declaring.examples import MODEL, SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.generation import (
    EXAMPLE_SCHEMA,
    EXAMPLE_TOOL,
    MAXIMUM_ALTERNATIVES,
    MAXIMUM_TURNS,
    FormatType,
    ToolMode,
    Tools,
    WhitespaceFlexible,
)
from tuneship.contract.openai.answer_parts import (
    PENALTIES,
    Answered,
    CompletionUsage,
    FinishReason,
    NamedSchema,
    SampledRequest,
    TextPart,
    main_format,
    refuse_other_fields,
    text_of_parts,
)
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.request_fields import ANY_VALUE, NeutralFields, OpenAIRequest
from tuneship.contract.openai.tool_choices import ChosenTools, check_fields
from tuneship.contract.schemas.tools import (
    MAXIMUM_CALLS,
    MAXIMUM_FUNCTIONS,
    Arguments,
    CallId,
    FunctionName,
    WrittenCall,
    check_turn,
    fault_of_calls,
)


class ChatPart(TextPart):
    """One part of a message: text, or what an assistant has refused with."""

    unsupported = frozenset({"image_url", "input_audio", "file"})
    neutral: ClassVar[NeutralFields] = {"prompt_cache_breakpoint": ANY_VALUE}

    type: Literal["text", "refusal"]


class ChatCalledFunction(OpenAIRequest):
    """The name and the arguments of a call."""

    # The package puts the arguments, as objects of the program, beside them.
    neutral: ClassVar[NeutralFields] = {"parsed_arguments": ANY_VALUE}

    name: FunctionName
    arguments: Arguments


class ChatCall(OpenAIRequest):
    """A call in an earlier turn of the assistant."""

    # Programs that put streamed pieces together keep the place of a call.
    neutral: ClassVar[NeutralFields] = {"index": ANY_VALUE}

    id: CallId
    type: Literal["function"]
    function: ChatCalledFunction


class ChatMessage(OpenAIRequest):
    """One turn of a conversation, or the message of an earlier answer. `developer` is another name of `system`."""

    # Templates show none of them.
    neutral: ClassVar[NeutralFields] = {
        "name": ANY_VALUE,
        "annotations": ANY_VALUE,
        "reasoning": ANY_VALUE,
        "reasoning_content": ANY_VALUE,
        "parsed": ANY_VALUE,
    }
    unsupported = frozenset({"function_call", "audio"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[ChatPart], Field(min_length=1)] | None,
        Field(description="May be empty; null only in an assistant's turn."),
    ] = None
    refusal: Annotated[
        str | None, Field(description="What an assistant has said in place of a content.")
    ] = None
    tool_calls: Annotated[
        list[ChatCall] | None,
        Field(max_length=MAXIMUM_CALLS, description="Calls of an assistant's turn."),
    ] = None
    tool_call_id: Annotated[
        CallId | None,
        Field(description="The call whose result a tool's turn is, which needs it."),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        """Answers without text have the content null; a turn that lacks it is a mistake."""
        if not isinstance(value, dict):
            return value
        sent = cast("dict[str, Any]", value)
        if sent.get("role") == "assistant" and sent.get("content", "") is None:
            sent = {**sent, "content": ""}
        return {name: one for name, one in sent.items() if (name, one) != ("tool_calls", [])}

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("missing", "is required", {"below": ".tool_call_id"})
        if self.role != "assistant" and self.refusal is not None:
            text = "belongs to the role assistant"
            raise PydanticCustomError("conflict", text, {"below": ".refusal"})
        content = self.refusal if self.content is None else self.content
        check_turn(self.role, content, self.tool_calls, self.tool_call_id)
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as the main API takes it."""
        return {
            "role": self.role,
            "content": text_of_parts(self.content) or self.refusal or "",
            "tool_calls": self.tool_calls and [call.model_dump() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }


class ChosenFunction(OpenAIRequest):
    """The name of a function."""

    name: FunctionName


class ChosenTool(OpenAIRequest):
    """One of the request's functions."""

    neutral: ClassVar[NeutralFields] = {"type": ("function",)}

    function: ChosenFunction


class AllowedTools(OpenAIRequest):
    """The functions that may be called, of all that the model reads."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAXIMUM_FUNCTIONS)]


class ChatToolChoice(OpenAIRequest):
    """A function that must be called once, or the functions that may be called."""

    unsupported = frozenset({"custom"})

    type: Literal["function", "allowed_tools"]
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> Self:
        check_fields(self, {"function": ("function",), "allowed_tools": ("allowed_tools",)})
        return self


class ChatResponseFormat(OpenAIRequest):
    """The form of the answer: any text, any JSON object, or JSON that fits a schema."""

    type: FormatType
    json_schema: NamedSchema | None = None
    whitespace_flexible: WhitespaceFlexible = False

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        refuse_other_fields(self.type, {"json_schema": self.json_schema}, ("json_schema",))
        return self

    @property
    def for_the_main_api(self) -> dict[str, Any]:
        """The same as the main API takes it."""
        schema = self.json_schema and self.json_schema.json_schema
        return main_format(self.type, schema, is_flexible=self.whitespace_flexible)


class ChatCompletionCreate(SampledRequest):
    """A conversation for a model to continue."""

    neutral: ClassVar[NeutralFields] = {
        **PENALTIES,
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
    tools: Annotated[
        Tools, Field(description="Functions that the model may call; arguments fit their schemas.")
    ] = None
    tool_choice: Annotated[
        ToolMode | ChatToolChoice | None,
        Field(description="`none`: the model does not see the functions."),
    ] = None
    parallel_tool_calls: bool = True
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def chosen(self) -> ChosenTools:
        """The meaning of `tool_choice`."""
        choice = self.tool_choice
        if not isinstance(choice, ChatToolChoice):
            return ChosenTools(choice, None)
        if choice.function is not None:
            return ChosenTools("required", [choice.function.name], is_named=True)
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools] if allowed is not None else None
        return ChosenTools(None if allowed is None else allowed.mode, names)

    @model_validator(mode="after")
    def _calls_and_choices_that_fit(self) -> Self:
        fault = fault_of_calls([message.model_dump() for message in self.messages])
        if fault is not None:
            place = {"param": f"messages[{fault.turn}]{fault.field}"}
            raise PydanticCustomError("value_error", cast("Any", fault.message), place)
        self.chosen.check([tool.function.name for tool in self.tools or ()])
        return self

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
    content: Annotated[str | None, Field(description="Null if there are calls alone.")]
    refusal: None = None
    tool_calls: Annotated[list[WrittenCall] | None, Field(exclude_if=absent)] = None


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
    tool_calls: Annotated[list[WrittenCall] | None, Field(exclude_if=absent)] = None


class ChatChunkChoice(Reply):
    """A piece of one answer; the last one says why it ended."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Answered):
    """One piece of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class CountedChatChunk(ChatChunk):
    """One piece of a streamed answer with `include_usage`; the last one has no choices but the usage."""

    usage: CompletionUsage | None = None


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
            "tools": {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Is code H25.9 still valid?"}],
                "tools": [EXAMPLE_TOOL],
            },
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
    """Continue a conversation with a model, or with what an endpoint's split draws.

    A model that no deployment serves gets one, for a key with `deployments:write`.
    """
    raise NotImplementedError
