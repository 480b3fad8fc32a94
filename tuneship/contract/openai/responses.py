"""Responses of OpenAI's API, without state: nothing is stored, so every request holds its whole conversation."""

from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from tuneship.contract.common import Reply, absent
from tuneship.contract.declaring.examples import MODEL, SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.generation import (
    EXAMPLE_SCHEMA,
    EXAMPLE_TOOL,
    MAXIMUM_TURNS,
    FormatType,
    SchemaOfAnswer,
    ToolMode,
    WhitespaceFlexible,
)
from tuneship.contract.openai.answer_parts import (
    AskedModel,
    AskingUser,
    SchemaDescription,
    SchemaName,
    TextPart,
    main_format,
    refuse_other_fields,
    text_of_parts,
)
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.request_fields import ANY_VALUE, NeutralFields, OpenAIRequest
from tuneship.contract.openai.tool_choices import ChosenTools, check_fields
from tuneship.contract.schemas.tools import (
    MAXIMUM_FUNCTIONS,
    Arguments,
    CallId,
    FunctionName,
    ParametersSchema,
    Strict,
)

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


# Lists that OpenAI's types require, and that are empty here.
Nothing = Annotated[list[Any], Field(max_length=0)]


class InputPart(TextPart):
    """One part of a turn: text that a person wrote, or that an earlier response holds."""

    unsupported = frozenset({"image_url", "file_id", "file_data", "file_url", "filename", "detail"})
    neutral: ClassVar[NeutralFields] = {
        "prompt_cache_breakpoint": ANY_VALUE,
        "annotations": ANY_VALUE,
        "logprobs": ANY_VALUE,
        "parsed": ANY_VALUE,
    }

    type: Literal["input_text", "output_text", "refusal"]


class InputMessage(OpenAIRequest):
    """One turn of a conversation, or the message of an earlier response. `developer` is another name of `system`."""

    neutral: ClassVar[NeutralFields] = {
        "type": ("message",),
        "id": ANY_VALUE,
        "status": ANY_VALUE,
        "phase": ANY_VALUE,
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(min_length=1)]

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as the main API takes it."""
        return {"role": self.role, "content": text_of_parts(self.content)}


class InputCall(OpenAIRequest):
    """A call of a function in an earlier response."""

    neutral: ClassVar[NeutralFields] = {
        "type": ("function_call",),
        "id": ANY_VALUE,
        "parsed_arguments": ANY_VALUE,
        "status": ANY_VALUE,
    }
    unsupported = frozenset({"async", "caller", "namespace"})

    call_id: CallId
    name: FunctionName
    arguments: Arguments

    @property
    def call(self) -> dict[str, Any]:
        """The call as the main API takes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class InputResult(OpenAIRequest):
    """The result of a call."""

    neutral: ClassVar[NeutralFields] = {
        "type": ("function_call_output",),
        "id": ANY_VALUE,
        "name": ANY_VALUE,
        "status": ANY_VALUE,
    }
    unsupported = frozenset({"caller", "namespace"})

    call_id: CallId
    output: str | Annotated[list[InputPart], Field(min_length=1)]

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as the main API takes it."""
        return {
            "role": "tool",
            "content": text_of_parts(self.output),
            "tool_call_id": self.call_id,
        }


class InputReasoning(OpenAIRequest):
    """The reasoning of an earlier response of another service, which no model here reads."""

    neutral: ClassVar[NeutralFields] = {
        "type": ("reasoning",),
        "id": ANY_VALUE,
        "summary": ANY_VALUE,
        "content": ANY_VALUE,
        "encrypted_content": ANY_VALUE,
        "status": ANY_VALUE,
    }


def _kind_of_item(item: Any) -> str:
    kind: object = cast("dict[str, Any]", item).get("type") if isinstance(item, dict) else None
    is_other = kind in ("function_call", "function_call_output", "reasoning")
    return f"~{kind}" if is_other else "~message"


# The kind of an item is chosen before it is read, so that it is refused for what it lacks, and not for what it is not.
# Names of branches that begin so are left out of the places in refusals.
InputItem = Annotated[
    Annotated[InputMessage, Tag("~message")]
    | Annotated[InputCall, Tag("~function_call")]
    | Annotated[InputResult, Tag("~function_call_output")]
    | Annotated[InputReasoning, Tag("~reasoning")],
    Discriminator(_kind_of_item),
]
Input = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAXIMUM_TURNS), Tag("~items")],
    Discriminator(lambda sent: "~items" if isinstance(sent, list) else "~text"),
]


class ResponseTool(OpenAIRequest):
    """A function that the model may call."""

    neutral: ClassVar[NeutralFields] = {"type": ("function",)}
    unsupported = frozenset({"async", "allowed_callers", "defer_loading", "output_schema"})

    name: FunctionName
    description: str | None = None
    parameters: ParametersSchema | None = None
    strict: Strict = None

    @property
    def for_the_main_api(self) -> dict[str, Any]:
        """The same as the main API takes it."""
        return {"type": "function", "function": self.model_dump(exclude_none=True)}


class ResponseToolName(OpenAIRequest):
    """One of the request's functions."""

    neutral: ClassVar[NeutralFields] = {"type": ("function",)}

    name: FunctionName


class ResponseToolChoice(OpenAIRequest):
    """A function that must be called once, or the functions that may be called."""

    type: Literal["function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[
        list[ResponseToolName] | None, Field(min_length=1, max_length=MAXIMUM_FUNCTIONS)
    ] = None

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> Self:
        check_fields(self, {"function": ("name",), "allowed_tools": ("mode", "tools")})
        return self


class TextFormat(OpenAIRequest):
    """The form of the answer: any text, any JSON object, or JSON that fits a schema."""

    type: FormatType
    name: SchemaName | None = None
    description: SchemaDescription = None
    json_schema: Annotated[SchemaOfAnswer | None, Field(alias="schema")] = None
    strict: Strict = None
    whitespace_flexible: WhitespaceFlexible = False

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        given: dict[str, object] = {
            "name": self.name,
            "description": self.description,
            "schema": self.json_schema,
            "strict": self.strict,
        }
        refuse_other_fields(self.type, given, ("name", "schema"))
        return self

    @property
    def for_the_main_api(self) -> dict[str, Any]:
        """The same as the main API takes it."""
        return main_format(self.type, self.json_schema, is_flexible=self.whitespace_flexible)


class TextOptions(OpenAIRequest):
    """The form of the answer."""

    neutral: ClassVar[NeutralFields] = {"verbosity": ("medium",)}

    format: Annotated[
        TextFormat | None,
        Field(description="The answer is complete and fits, or it is `incomplete`."),
    ] = None


class ResponseStreamOptions(OpenAIRequest):
    """Options of a stream."""

    neutral: ClassVar[NeutralFields] = {"include_obfuscation": (False,)}


class ResponseCreate(OpenAIRequest):
    """A text or a conversation for a model to answer."""

    neutral: ClassVar[NeutralFields] = {
        "background": (False,),
        # Asks for a part of answers that no model here writes.
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": ANY_VALUE,
        "prompt_cache_options": ANY_VALUE,
        "prompt_cache_retention": ANY_VALUE,
        "reasoning": ({}, {"effort": "none"}),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    unsupported = frozenset(
        {
            "access_programs",
            "background_options",
            "context_management",
            "conversation",
            "image",
            "moderation",
            "previous_response_id",
            "prompt",
        }
    )

    model: AskedModel
    input: Input
    instructions: Annotated[
        str | None, Field(description="Stands before the conversation, as its system turn.")
    ] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    text: TextOptions | None = None
    tools: Annotated[
        list[ResponseTool] | None,
        Field(
            max_length=MAXIMUM_FUNCTIONS,
            description="Functions that the model may call; arguments fit their schemas.",
        ),
    ] = None
    tool_choice: Annotated[
        ToolMode | ResponseToolChoice | None,
        Field(description="`none`: the model does not see the functions."),
    ] = None
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[Metadata | None, Field(description="Is returned with the answer.")] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: AskingUser = None

    @property
    def person(self) -> str | None:
        """The text that stands for the person who asks."""
        return self.safety_identifier or self.user or self.prompt_cache_key

    @property
    def chosen(self) -> ChosenTools:
        """The meaning of `tool_choice`."""
        choice = self.tool_choice
        if not isinstance(choice, ResponseToolChoice):
            return ChosenTools(choice, None)
        if choice.name is not None:
            return ChosenTools("required", [choice.name], is_named=True)
        return ChosenTools(choice.mode, [tool.name for tool in choice.tools or ()])

    @model_validator(mode="after")
    def _choice_that_fits(self) -> Self:
        self.chosen.check([tool.name for tool in self.tools or ()])
        return self


class OutputText(Reply):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Nothing = Field(default_factory=list[Any])
    logprobs: Nothing = Field(default_factory=list[Any])


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(Reply):
    """The turn that a model wrote."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ResponseStatus
    content: list[OutputText]


class OutputCall(Reply):
    """A call that the model wrote. Its arguments fit the function's schema unless it is incomplete."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: ResponseStatus


class AnswerTool(Reply):
    """A function of the request."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputTokenDetails(Reply):
    """Cached tokens of the prompt: always 0, because the engine does not count its prefix cache by request."""

    cached_tokens: Literal[0] = 0
    cache_write_tokens: Literal[0] = 0


class OutputTokenDetails(Reply):
    """Always 0: no model here reasons apart from its answer."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(Reply):
    """Tokens that the model read and wrote."""

    input_tokens: int
    input_tokens_details: InputTokenDetails = Field(default_factory=InputTokenDetails)
    output_tokens: int
    output_tokens_details: OutputTokenDetails = Field(default_factory=OutputTokenDetails)
    total_tokens: int


class IncompleteDetails(Reply):
    """The reason of an answer without an end: it reached its limit."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Reply):
    """The error that ended a streamed answer."""

    code: Literal["server_error"] = "server_error"
    message: str


class AnswerFormat(Reply):
    """The form of an answer."""

    type: FormatType = "text"
    name: Annotated[str | None, Field(exclude_if=absent)] = None
    description: Annotated[str | None, Field(exclude_if=absent)] = None
    json_schema: Annotated[
        dict[str, Any] | None,
        Field(alias="schema", exclude_if=absent, description="As it was sent."),
    ] = None
    strict: Annotated[bool | None, Field(exclude_if=absent)] = None


class AnswerText(Reply):
    """The form of an answer, and how long it is."""

    format: AnswerFormat = Field(default_factory=AnswerFormat)
    verbosity: Literal["medium"] = "medium"


class ResponseObject(Reply):
    """An answer, and the settings that made it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: Annotated[str, Field(description="The model that answered, also for an endpoint.")]
    output: list[OutputMessage | OutputCall] = Field(
        default_factory=list[OutputMessage | OutputCall]
    )
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    reasoning: None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: AnswerText = Field(default_factory=AnswerText)
    tool_choice: Annotated[
        ToolMode | dict[str, Any], Field(description="As it was sent; `auto` without one.")
    ] = "auto"
    tools: list[AnswerTool] = Field(default_factory=list[AnswerTool])
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: Annotated[str | None, Field(exclude_if=absent)] = None


EXAMPLE_RESPONSE: dict[str, Any] = {
    "id": f"resp_{SUFFIX}",
    "object": "response",
    "created_at": 1_772_366_400,
    "completed_at": 1_772_366_401,
    "status": "completed",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": "Name the chapter.",
    "max_output_tokens": 64,
    "metadata": {},
    "model": MODEL,
    "output": [
        {
            "id": f"msg_{SUFFIX}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {
                    "type": "output_text",
                    "text": "Diseases of the eye",
                    "annotations": [],
                    "logprobs": [],
                }
            ],
        }
    ],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 0.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": {
        "input_tokens": 21,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 27,
    },
}


@openai_operation(
    "POST",
    "responses",
    scope="generate",
    example=Example(
        {
            "text": {
                "model": MODEL,
                "instructions": "Name the chapter.",
                "input": "senile cataract",
                "max_output_tokens": 64,
                "temperature": 0.0,
            },
            "tools": {
                "model": MODEL,
                "input": "Is code H25.9 still valid?",
                "tools": [{"type": "function", **EXAMPLE_TOOL["function"]}],
            },
            "schema": {
                "model": MODEL,
                "input": "senile cataract",
                "text": {
                    "format": {"type": "json_schema", "name": "chapter", "schema": EXAMPLE_SCHEMA}
                },
            },
        },
        EXAMPLE_RESPONSE,
    ),
)
def openai_create_response(request: ResponseCreate) -> ResponseObject:
    """Answer a text or a conversation; nothing of it is stored.

    A model that no deployment serves gets one, for a key with `deployments:write`.
    """
    raise NotImplementedError
