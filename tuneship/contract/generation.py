"""Text generation on the wire (§2.6, §4.7), for deployments and for endpoints."""

import json
from typing import Annotated, Any, Literal, LiteralString, Self, cast

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import AnyEndpointId, CreateRequest, DeploymentId, Reply, absent
from tuneship.contract.declaring.examples import CANDIDATE, SUFFIX
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.errors import DeploymentError, InvalidRequestError
from tuneship.contract.schemas.answer_schemas import followed
from tuneship.contract.schemas.tools import (
    MAXIMUM_CALLS,
    MAXIMUM_FUNCTIONS,
    CallId,
    FunctionName,
    FunctionTool,
    TurnCall,
    WrittenCall,
    arguments_of,
    check_functions,
    check_turn,
    fault_of_calls,
)
from tuneship.contract.token_inputs import TokenId

# Bounds the work of a template before the tokens can be counted.
MAXIMUM_TURNS = 1000
# Answers of one request: as many as the generations that a client may have in flight.
MAXIMUM_ANSWERS = 64
MAXIMUM_ALTERNATIVES = 20
# In all answers to one request, with those of the prompt. With more, a pass of the garbage collector would hold up the
# event loop.
MAXIMUM_LOGPROBS = 32 * 1024
# Engines have this many.
SEEDS = 2**63


class Turn(CreateRequest):
    """One turn of a conversation, as in a `conversation` dataset."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[
        str | None, Field(description="May be empty, and absent beside `tool_calls`.")
    ] = None
    tool_calls: Annotated[
        list[TurnCall] | None,
        Field(
            min_length=1,
            max_length=MAXIMUM_CALLS,
            description="Additive. Calls that an assistant's turn has made.",
        ),
    ] = None
    tool_call_id: Annotated[
        CallId | None, Field(description="Additive. The call whose result a tool's turn is.")
    ] = None

    @model_validator(mode="after")
    def _content_of_its_role(self) -> Self:
        check_turn(self.role, self.content, self.tool_calls, self.tool_call_id)
        return self

    @property
    def text(self) -> str:
        """The content; empty where there is none."""
        return self.content or ""

    @property
    def for_the_template(self) -> dict[str, Any]:
        """The turn as templates write it: the arguments of calls are objects."""
        turn: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls is not None:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def _answerable(turns: list[Turn] | None) -> list[Turn] | None:
    """Refuse conversations that a model does not answer; its template may refuse others when it renders them."""
    if turns is None:
        return None
    if turns[-1].role == "assistant":
        raise ValueError("must not end with a turn of the model, which is not continued")
    fault = fault_of_calls([turn.model_dump() for turn in turns])
    if fault is not None:
        place = {"below": f"[{fault.turn}]{fault.field}"}
        raise PydanticCustomError("value_error", cast("LiteralString", fault.message), place)
    return turns


def _functions(tools: list[FunctionTool] | None) -> list[FunctionTool] | None:
    if tools:
        functions = [tool.function for tool in tools]
        check_functions(
            [function.name for function in functions],
            [function.parameters for function in functions],
        )
    return tools


Tools = Annotated[
    list[FunctionTool] | None,
    Field(max_length=MAXIMUM_FUNCTIONS),
    AfterValidator(_functions),
]
ToolMode = Literal["auto", "none", "required"]


SchemaOfAnswer = Annotated[
    dict[str, Any],
    AfterValidator(followed),
    Field(
        description="JSON Schema that the answer must fit. A keyword that is not supported is refused by its place; "
        "the model does not read the schema.\n\n"
        "The place in `param` has numbers instead of names of properties, since these are yours: "
        "`schema.properties[2].minProperties` is in the third one."
    ),
]
FormatType = Literal["text", "json_object", "json_schema"]
WhitespaceFlexible = Annotated[
    bool,
    Field(
        description="Additive. Whether JSON may have a space, or a new line with its indentation, between any two "
        "parts. Otherwise it has a space behind each comma and colon, or nowhere."
    ),
]


class ResponseFormat(CreateRequest):
    """The form of an answer: any text, any JSON object, or JSON that fits a schema.

    Such an answer is complete and fits, or its `finish_reason` is `length`, also where a `stop` text ends it early.
    """

    type: FormatType
    json_schema: Annotated[SchemaOfAnswer | None, Field(alias="schema")] = None
    whitespace_flexible: WhitespaceFlexible = False

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "is required", {"below": ".schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError(
                "conflict", "needs the type json_schema", {"below": ".schema"}
            )
        return self


def _one_prompt(schema: dict[str, Any]) -> None:
    # Written with `if`, code generators still see one class; `oneOf` would give them three.
    schema |= {
        "if": {"required": ["messages"]},
        "then": {"not": {"anyOf": [{"required": ["prompt"]}, {"required": ["prompt_token_ids"]}]}},
        "else": {
            "if": {"required": ["prompt_token_ids"]},
            "then": {"not": {"required": ["prompt"]}},
            "else": {"required": ["prompt"]},
        },
    }


class Generate(CreateRequest):
    """A generation from one of `prompt`, `messages` and `prompt_token_ids`.

    Defaults come from the deployment's `model_config`; without one, `max_tokens` is 256 or the deployment's limit,
    `temperature` 0.7 and `top_p` 1. A prompt that is too long for the context is 422 with both counts.

    A special token that a `prompt` or a content spells is plain text and opens no turn. Where the model's tokenizer
    cannot distinguish the two, the field is refused (422).
    """

    model_config = ConfigDict(json_schema_extra=_one_prompt)

    prompt: Annotated[str | None, Field(min_length=1)] = None
    messages: Annotated[
        list[Turn] | None,
        Field(min_length=1, max_length=MAXIMUM_TURNS, description="Additive."),
        AfterValidator(_answerable),
    ] = None
    prompt_token_ids: Annotated[
        list[TokenId] | None,
        Field(
            min_length=1, description="Additive. The whole prompt as token ids, without a template."
        ),
    ] = None
    raw: Annotated[
        bool,
        Field(
            description="Additive. Take `prompt` as it is, without the chat template; what spells a special token of "
            "the model is that token.\n\n"
            "Such a prompt has to bring its turns itself."
        ),
    ] = False
    max_tokens: Annotated[
        int | None, Field(ge=0, description="0, which writes nothing, goes with `prompt_logprobs`.")
    ] = None
    temperature: Annotated[
        float | None,
        Field(
            ge=0,
            le=2,
            description="0 is greedy, and so is anything below 0.000001, which would only amplify rounding errors.",
        ),
    ] = None
    top_p: Annotated[float | None, Field(ge=0, le=1, description="0 is greedy.")] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] = Field(
        default_factory=list[str], description="Texts that end the completion; they are cut off."
    )
    seed: Annotated[
        int | None,
        AfterValidator(lambda seed: None if seed is None else seed % SEEDS),
        Field(
            description="Any integer. Those that differ by a multiple of 2^63 are the same seed."
        ),
    ] = None
    stream: Annotated[
        bool,
        Field(
            description="Additive. Send the text while it is generated: server-sent events `token` with a piece of "
            "text each, at the end `done` with the whole reply, or `error` with an error body."
        ),
    ] = False
    n: Annotated[
        int,
        Field(
            ge=1,
            le=MAXIMUM_ANSWERS,
            description="Additive. Answers to write; with a `seed`, each has the next one.\n\n"
            "The prompt is counted once, and so is the request.",
        ),
    ] = 1
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAXIMUM_ALTERNATIVES,
            description="Additive. Return the log probability of each token, and of this many of the likeliest at its "
            "place: those of the model itself, whatever the temperature. One request may ask for "
            f"{MAXIMUM_LOGPROBS:,} in all: answers x tokens x (1 + this number).",
        ),
    ] = None
    prompt_logprobs: Annotated[
        bool,
        Field(description="Additive. With `logprobs`, return those of the prompt's tokens, too."),
    ] = False

    response_format: Annotated[
        ResponseFormat | None,
        Field(description="Additive. The form of the answer; without it, any text."),
    ] = None
    tools: Annotated[
        Tools,
        Field(
            description="Additive. Functions that the model may call. An answer is text, or ends with calls; their "
            "arguments fit the functions' schemas."
        ),
    ] = None
    tool_choice: Annotated[
        ToolMode | None,
        Field(
            description="Additive. `auto`: the model decides; `required`: it calls at least one function; `none`: it "
            "does not see the functions. Without it `auto`."
        ),
    ] = None
    allowed_tools: Annotated[
        list[FunctionName] | None,
        Field(
            min_length=1,
            max_length=MAXIMUM_FUNCTIONS,
            description="Additive. Names of the `tools` that may be called; without it, all may be.",
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool, Field(description="Additive. Whether an answer may have several calls.")
    ] = True

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """The functions that an answer may call."""
        if self.tool_choice == "none":
            return []
        allowed = self.allowed_tools
        tools = self.tools or []
        return [tool for tool in tools if allowed is None or tool.function.name in allowed]

    @model_validator(mode="before")
    @classmethod
    def _prompt_or_messages(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        # Before the fields are read, so that a body without any is refused for that alone.
        if all(fields.get(name) is None for name in ("prompt", "messages", "prompt_token_ids")):
            raise PydanticCustomError("missing", "is required", {"param": "prompt"})
        return fields

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        def refuse(name: str, message: LiteralString) -> None:
            raise PydanticCustomError("conflict", message, {"param": name})

        if self.messages is not None and self.prompt is not None:
            refuse("messages", "must not be sent beside a prompt")
        if self.prompt_token_ids is not None and (self.messages or self.prompt) is not None:
            refuse("prompt_token_ids", "must not be sent beside a prompt or messages")
        if self.raw and self.messages is not None:
            refuse("raw", "must not be sent beside messages, which are rendered")
        if self.prompt_logprobs and self.logprobs is None:
            refuse("prompt_logprobs", "needs logprobs")
        if self.max_tokens == 0 and not self.prompt_logprobs:
            refuse("max_tokens", "may be 0 only with prompt_logprobs")
        if self.top_p == 0:  # which engines do not take
            self.temperature, self.top_p = 0.0, None
        return self

    @model_validator(mode="after")
    def _functions_fit(self) -> Self:
        if self.tools and (self.raw or self.prompt_token_ids is not None):
            text = "needs messages or a prompt that is rendered"
            raise PydanticCustomError("conflict", text, {"param": "tools"})
        if not self.tools and self.tool_choice == "required":
            raise PydanticCustomError("conflict", "needs tools", {"param": "tool_choice"})
        names = {tool.function.name for tool in self.tools or ()}
        for number, name in enumerate(self.allowed_tools or ()):
            if name not in names:
                place = {"param": f"allowed_tools[{number}]"}
                raise PydanticCustomError("value_error", "is no function of tools", place)
        return self


class Usage(Reply):
    """Tokens the model read (template included) and wrote (end token excluded)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class LikelyToken(Reply):
    """A token and the natural logarithm of its probability."""

    id: int
    token: Annotated[
        str,
        Field(description="Its text; `bytes:\\xe2\\x80` for a part of a character."),
    ]
    bytes: list[int]
    logprob: Annotated[
        float | None, Field(description="Null for a prompt's first token; -9999 is impossible.")
    ]


class TokenLogprob(LikelyToken):
    """A token of a text, with the likeliest tokens at its place, the likeliest first."""

    top: list[LikelyToken]


Logprobs = Annotated[
    list[TokenLogprob] | None, Field(exclude_if=absent, description="Only with `logprobs`.")
]


ToolCalls = Annotated[
    list[WrittenCall] | None,
    Field(exclude_if=absent, description="The calls that the answer ends with, if there are any."),
]


class GeneratedChoice(Reply):
    """One of several answers."""

    completion: str
    tool_calls: ToolCalls = None
    finish_reason: str
    logprobs: Logprobs = None


class Generation(Reply):
    """A completion and the deployment that served it. `prompt` is as it was sent, absent for any other.

    With `n` above 1, `choices` has all answers, and `completion`, `tool_calls`, `finish_reason` and `logprobs` are the
    first one's. With calls, `completion` is the text before them, and `finish_reason` is `tool_calls` or `length`.
    `logprobs` are of the tokens whose text is part of the completion.
    """

    id: str
    deployment_id: str
    prompt: Annotated[str | None, Field(exclude_if=absent)] = None
    completion: str
    tool_calls: ToolCalls = None
    finish_reason: str
    logprobs: Logprobs = None
    prompt_logprobs: Logprobs = None
    choices: Annotated[list[GeneratedChoice] | None, Field(exclude_if=absent)] = None
    usage: Usage


class GeneratedText(Reply):
    """A piece of a streamed completion; all pieces together, of one `index`, are the completion."""

    text: str
    tool_calls: Annotated[
        list[WrittenCall] | None, Field(exclude_if=absent, description="Pieces of calls.")
    ] = None
    index: Annotated[
        int | None, Field(exclude_if=absent, description="Number of the answer, with `n` above 1.")
    ] = None
    logprobs: Logprobs = None


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

EXAMPLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"chapter": {"type": "string"}, "is_chronic": {"type": "boolean"}},
    "required": ["chapter", "is_chronic"],
    "additionalProperties": False,
}

EXAMPLE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up_code",
        "description": "Look up a code of ICD-10-CM.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}

EXAMPLE = Example(
    {
        "prompt": {"prompt": EXAMPLE_PROMPT, "max_tokens": 64, "temperature": 0.0, "stop": ["\n"]},
        "messages": {"messages": [{"role": "user", "content": EXAMPLE_PROMPT}]},
        "stream": {"prompt": EXAMPLE_PROMPT, "stream": True},
        "schema": {
            "prompt": EXAMPLE_PROMPT,
            "response_format": {"type": "json_schema", "schema": EXAMPLE_SCHEMA},
        },
        "tools": {
            "messages": [{"role": "user", "content": "Is code H25.9 still valid?"}],
            "tools": [EXAMPLE_TOOL],
            "tool_choice": "required",
        },
        "score": {
            "prompt": "Senile cataract is a disease of the eye",
            "raw": True,
            "max_tokens": 0,
            "logprobs": 1,
            "prompt_logprobs": True,
        },
    },
    EXAMPLE_REPLY,
    streams={"text/event-stream": EXAMPLE_EVENTS, "application/x-ndjson": EXAMPLE_LINES},
)


@operation(
    "POST",
    "/v1/deployments/{deployment_id}/generate",
    scope="generate",
    errors=(DeploymentError, (DeploymentError, 503)),
    example=EXAMPLE,
)
def generate(deployment_id: DeploymentId, request: Generate) -> Generation:
    """Generate with one deployment (§4.7).

    With `stream` the text is sent while it is generated: as server-sent events (`token` with a piece of the text, at
    the end `done` with the whole reply), or as one JSON object a line for `Accept: application/x-ndjson`. A failure
    before the first piece has its own status; a later one is a last event `error`. A service that shuts down lets
    streams finish.

    When a replica is lost, another one runs its requests once more, unless their text has begun to stream; otherwise
    they fail with 503 and `Retry-After`. No text of a request or answer is stored, so an `Idempotency-Key` has no
    effect here.
    """
    raise NotImplementedError


@operation(
    "POST",
    "/v1/endpoints/{endpoint_id}/generate",
    scope="generate",
    errors=(DeploymentError, (DeploymentError, 503), (InvalidRequestError, 409)),
    headers=("X-Routing-Key",),
    example=EXAMPLE,
)
def generate_by_endpoint(endpoint_id: AnyEndpointId, request: Generate) -> Generation:
    """Generate through an endpoint; a canary endpoint draws the deployment by its split (§4.6).

    `deployment_id` and `X-Deployment-ID` say which deployment answered. Without `X-Routing-Key` each request is drawn
    by itself. The errors of a member that does not serve are answered as they are. With `stream` as for a deployment.
    """
    raise NotImplementedError
