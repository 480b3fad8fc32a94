"""Functions that a model may call, and its calls: their form on the wire, and which belong together. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tuneship.contract.common import CreateRequest, Reply, absent
from tuneship.contract.lines import strict_json
from tuneship.contract.schemas.answer_schemas import (
    MAX_SCHEMA_BYTES,
    MAX_SUBSCHEMAS,
    followed,
    read_schema,
)

MAXIMUM_FUNCTIONS = 128
# In one turn of a conversation.
MAXIMUM_CALLS = 128
MAXIMUM_CALL_ID_CHARACTERS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"
FUNCTION_NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")
# For a function without parameters.
NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}

FunctionName = Annotated[str, Field(pattern=NAME_PATTERN)]
Strict = Annotated[
    bool | None,
    Field(description="Every schema is followed strictly, whatever this says."),
]
CallId = Annotated[str, Field(min_length=1, max_length=MAXIMUM_CALL_ID_CHARACTERS)]


def _of_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object":
        raise _pydantic_error("invalid_value", "must be object, as arguments have names", ".type")
    return schema


def _pydantic_error(code: str, message: str, below: str = "") -> PydanticCustomError:
    return PydanticCustomError(cast("Any", code), cast("Any", message), {"below": below})


def _object_as_text(text: str) -> str:
    # As some services write a call without arguments, and as one looks that was cut behind its name.
    if not text.strip():
        return "{}"
    if arguments_of(text) is None:
        raise _pydantic_error("value_error", "must be a JSON object as text")
    return text


ParametersSchema = Annotated[
    dict[str, Any],
    AfterValidator(followed),
    AfterValidator(_of_arguments),
    Field(
        description="JSON Schema of the arguments, of type object; without it, there are none. A keyword that is not "
        "supported is refused by its place."
    ),
]
Arguments = Annotated[
    str,
    AfterValidator(_object_as_text),
    Field(description="A JSON object as text, as OpenAI's API has it."),
]


class FunctionDefinition(CreateRequest):
    """A function of the caller's program. The model reads the whole definition."""

    name: FunctionName
    description: str | None = None
    parameters: ParametersSchema | None = None
    strict: Strict = None


class FunctionTool(CreateRequest):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @model_validator(mode="wrap")
    @classmethod
    def _as_sent(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        made = read(value)
        if isinstance(value, dict):
            made._sent = cast("dict[str, Any]", value)  # noqa: SLF001 - of the same class
        return made

    @property
    def for_the_template(self) -> dict[str, Any]:
        """The tool as it was sent, with its keys in their order, as templates write it."""
        return self._sent or self.model_dump(exclude_unset=True)


class CalledFunction(CreateRequest):
    """The name and the arguments of a call."""

    name: FunctionName
    arguments: Arguments


class TurnCall(CreateRequest):
    """A call in an earlier turn of the assistant."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction


class WrittenFunction(Reply):
    """The name and the arguments of a call that the model wrote; in a stream, a piece of the arguments."""

    name: Annotated[str | None, Field(exclude_if=absent)] = None
    arguments: str


class WrittenCall(Reply):
    """A call that the model wrote. The arguments fit the function's schema unless the answer ends with `length`.

    In a stream a call begins with `id`, `type` and `name`, and the pieces of its arguments follow.
    """

    index: Annotated[int | None, Field(exclude_if=absent, description="In a stream.")] = None
    id: Annotated[str | None, Field(exclude_if=absent)] = None
    type: Annotated[Literal["function"] | None, Field(exclude_if=absent)] = None
    function: WrittenFunction


def check_functions(names: Sequence[str], schemas: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise pydantic's error for a name that comes twice, and for schemas that are too large together."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise _pydantic_error(
                "value_error", "is the name of an earlier function", f"[{number}]"
            )
    read = [read_schema(schema) for schema in schemas if schema is not None]
    if sum(len(one.parts) for one in read) > MAX_SUBSCHEMAS:
        text = f"must have at most {MAX_SUBSCHEMAS} schemas within all functions together"
        raise _pydantic_error("value_error", text)
    if sum(one.size for one in read) > MAX_SCHEMA_BYTES:
        text = f"must have at most {MAX_SCHEMA_BYTES} bytes of schemas together"
        raise _pydantic_error("value_error", text)


def check_turn(
    role: str, content: object, calls: Sequence[object] | None, call_id: str | None
) -> None:
    """Raise pydantic's error for a turn with fields of another role, or without a content that it needs."""
    if calls is not None and role != "assistant":
        raise _pydantic_error("conflict", "belongs to the role assistant", ".tool_calls")
    if call_id is not None and role != "tool":
        raise _pydantic_error("conflict", "belongs to the role tool", ".tool_call_id")
    if content is None and calls is None:
        raise _pydantic_error("missing", "is required", ".content")


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments of a call, parsed from their JSON; None if that is no JSON object."""
    try:
        value = strict_json.parse(text.encode(errors="surrogatepass"))
    except (strict_json.JsonRefused, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


class CallFault(NamedTuple):
    """A turn whose calls or results do not belong together; `field` is below the turn."""

    turn: int
    field: str
    message: str


def fault_of_calls(turns: Sequence[Mapping[str, Any]]) -> CallFault | None:
    """The first fault of a conversation: an id twice, a result without its call, a call without its result.

    The last turn needs no results of its calls. A result without an id, where no call waits for one, belongs to none.
    """
    pending: list[str | None] = []
    caller = 0
    for number, turn in enumerate(turns):
        answered: str | None = turn.get("tool_call_id")
        if turn["role"] == "tool" and answered is not None and answered not in pending:
            return CallFault(number, ".tool_call_id", "names no call that waits for its result")
        if turn["role"] == "tool":
            if pending:
                pending.remove(answered if answered in pending else pending[0])
            continue
        if pending:
            break
        calls: Sequence[Mapping[str, Any]] = turn.get("tool_calls") or ()
        pending, caller = [call.get("id") for call in calls], number
        for place, one in enumerate(pending):
            if one is not None and one in pending[:place]:
                return CallFault(number, f".tool_calls[{place}].id", "is the id of another call")
    if pending and caller != len(turns) - 1:
        return CallFault(caller, ".tool_calls", "must each have a result in the turns behind it")
    return None
