"""One line of a dataset, checked and normalised: the one parser of validate, upload, training and preview.

A line is a JSON object of format `instruction` or `conversation` (api docs: `docs/datasets.md`). Reports name the
field and a code, never the text: it may be a patient's.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

from tuneship.contract import strict_json
from tuneship.contract.example_problem import ExampleProblem
from tuneship.contract.tool_lines import (
    call_id,
    calls_of,
    check_calls,
    tools_of,
)

DatasetFormat = Literal["instruction", "conversation"]
ROLES = ("system", "user", "assistant", "tool")
# What other tools call these fields: their files need no conversion.
ALIASES = {
    "instruction": ("instruction", "prompt", "question"),
    "response": ("response", "completion", "output", "answer"),
}
# Fields whose values are no text but lists or objects.
STRUCTURED_FIELDS = ("messages", "conversations", "tools", "metadata")
# Every field that a line may have; others are ignored.
FIELDS = (*ALIASES["instruction"], *ALIASES["response"], "system", "input", *STRUCTURED_FIELDS)
LINE_LIMIT_BYTES = 8 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


class _MoreOfATurn(TypedDict, total=False):
    weight: int
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


class Message(_MoreOfATurn):
    """One turn; `weight` 0 leaves an assistant turn out of the loss.

    `tool_calls` are an assistant's, as OpenAI has them, but with arguments as objects; `tool_call_id` and `name` belong
    to a function's result.
    """

    role: str
    content: str


def parse_line(line: bytes, dataset_format: DatasetFormat) -> list[Message]:
    """Parse one JSON line into messages. Raises `ExampleProblem`."""
    return parse_example(decode_line(line), dataset_format)


def decode_line(line: bytes) -> Mapping[str, Any]:
    """The JSON object of a line. Raises `ExampleProblem`."""
    try:
        value = strict_json.parse(line, strict_json.MAXIMUM_VALUES_OF_LINE)
    except strict_json.JsonRefused as refused:
        # The codes of the reports are published, and have none of their own for U+0000.
        code = "invalid_utf8" if refused.fault == "nul" else refused.fault
        raise ExampleProblem(code, None, refused.message) from None
    if not isinstance(value, dict):
        raise ExampleProblem("not_object", None, "must be a JSON object")
    return cast("dict[str, Any]", value)


def parse_example(line: Mapping[str, Any], dataset_format: DatasetFormat) -> list[Message]:
    """Normalise one decoded line into messages; `tools_of` has its functions. Raises `ExampleProblem`."""
    if dataset_format == "conversation":
        return _conversation(line)
    if "messages" in line or "conversations" in line:
        raise ExampleProblem("mixed_format", "messages", "belongs to the format conversation")
    instruction = _required(line, "instruction")
    response = _required(line, "response")
    system = _optional(line, "system")
    context = _optional(line, "input")
    if not isinstance(line.get("metadata", {}), dict):
        raise ExampleProblem("wrong_type", "metadata", "must be an object")
    turns = instruction_messages(instruction, system=system, context=context)
    return [*turns, {"role": "assistant", "content": response}]


def other_names(line: Mapping[str, Any], dataset_format: DatasetFormat) -> list[str]:
    """Names that a good line uses instead of the format's own, e.g. `prompt` for `instruction`."""
    if dataset_format == "conversation":
        return ["conversations"] if "conversations" in line else []
    chosen = (next(name for name in names if name in line) for names in ALIASES.values())
    return [name for name in chosen if name not in ALIASES]


def instruction_messages(instruction: str, *, system: str = "", context: str = "") -> list[Message]:
    """The messages before the answer: the optional system turn, and instruction plus optional input as user turn."""
    user = f"{instruction}\n\n{context}" if context else instruction
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": user}]


def _required(line: Mapping[str, Any], field: str) -> str:
    name = (
        field if field in line else next((alias for alias in ALIASES[field] if alias in line), None)
    )
    if name is None:
        raise ExampleProblem("missing_field", field, "is required")
    return _text(line[name], name)


def _optional(line: Mapping[str, Any], field: str) -> str:
    value = line.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ExampleProblem("wrong_type", field, "must be a string")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ExampleProblem("wrong_type", field, "must be a string")
    if not value or value.isspace():
        raise ExampleProblem("empty_value", field, "must not be empty")
    return value


def _conversation(line: Mapping[str, Any]) -> list[Message]:
    if "conversations" in line:
        turns, field, role_key, text_key = line["conversations"], "conversations", "from", "value"
    elif "messages" in line:
        turns, field, role_key, text_key = line["messages"], "messages", "role", "content"
    elif any(alias in line for alias in ALIASES["instruction"]):
        raise ExampleProblem("mixed_format", "instruction", "belongs to the format instruction")
    else:
        raise ExampleProblem("missing_field", "messages", "is required")
    if not isinstance(turns, list) or not turns:
        raise ExampleProblem("wrong_type", field, "must be a non-empty list")
    tools = tools_of(line)
    messages = [
        _message(turn, f"{field}[{index}]", role_key, text_key)
        for index, turn in enumerate(cast("list[object]", turns))
    ]

    roles = [message["role"] for message in messages]
    # Chat templates know a system turn at the front only, and several fail on one elsewhere.
    if "system" in roles[1:]:
        index = roles.index("system", 1)
        raise ExampleProblem("invalid_role", f"{field}[{index}].role", "system stands only first")
    if "user" not in roles:
        raise ExampleProblem("missing_field", field, "needs at least one user turn")
    if roles[-1] != "assistant":
        raise ExampleProblem("no_assistant", field, "must end with an assistant turn")
    # Such an example has no token to learn from, and its loss would be 0 / 0.
    if all(turn.get("weight", 1) == 0 for turn in messages if turn["role"] == "assistant"):
        raise ExampleProblem("no_assistant", field, "every assistant turn has weight 0")
    check_calls(messages, tools, field)
    return messages


def _message(turn: object, field: str, role_key: str, text_key: str) -> Message:
    if not isinstance(turn, dict):
        raise ExampleProblem("wrong_type", field, "must be an object")
    fields = cast("dict[str, Any]", turn)
    if role_key not in fields:
        raise ExampleProblem("missing_field", f"{field}.{role_key}", "is required")
    role: object = fields[role_key]
    # ShareGPT's own words, beside which many files use the usual ones.
    if role_key == "from" and isinstance(role, str):
        role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        raise ExampleProblem("invalid_role", f"{field}.{role_key}", f"must be one of {ROLES}")
    calls = calls_of(fields, field) if role == "assistant" else []
    is_result = role == "tool"
    place = f"{field}.{text_key}"
    content = _content(fields, place, text_key, has_calls=bool(calls), is_result=is_result)
    message: Message = {"role": cast("str", role), "content": content}
    if calls:
        message["tool_calls"] = calls
    if is_result:
        message |= _result(fields, field)
    weight = fields.get("weight")
    if weight is not None:
        # `isinstance` would take a flag for a number.
        if type(weight) is not int or weight not in (0, 1):
            raise ExampleProblem("wrong_type", f"{field}.weight", "must be 0 or 1")
        message["weight"] = weight
    return message


def _content(
    fields: Mapping[str, Any], field: str, key: str, *, has_calls: bool, is_result: bool
) -> str:
    """The text of a turn. Beside calls there may be none, and a function's result may be empty."""
    if has_calls and fields.get(key) is None:
        return ""
    if key not in fields:
        raise ExampleProblem("missing_field", field, "is required")
    if fields[key] == "" and (has_calls or is_result):
        return ""
    return _text(fields[key], field)


def _result(fields: Mapping[str, Any], field: str) -> Message:
    """The fields of a function's result beside its text."""
    more: dict[str, Any] = {}
    identifier = call_id(fields.get("tool_call_id"), f"{field}.tool_call_id")
    if identifier is not None:
        more["tool_call_id"] = identifier
    name = fields.get("name")
    if isinstance(name, str):
        more["name"] = name  # some templates write it
    return cast("Message", more)


def text_of(message: Message) -> str:
    """The text of a turn with its calls as JSON, for counting and searching."""
    calls = message.get("tool_calls")
    if not calls:
        return message["content"]
    called = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
    return "\n".join([message["content"], *called])
