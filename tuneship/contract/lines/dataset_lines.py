"""One line of a dataset, checked and normalised: the one parser of validate, upload, training and preview.

A line is a JSON object of format `instruction` or `conversation` (api docs: `docs/datasets.md`). Reports name the
field and a code, never the text: it may be a patient's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, cast

from tuneship.contract.lines import strict_json
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.line_fields import (
    ALIASES,
    CALL_ROLES,
    ROLE_NAMES,
    DatasetFormat,
    chosen_alias,
)
from tuneship.contract.lines.line_fields import (
    other_names as other_names,  # noqa: PLC0414 - callers know it from here
)
from tuneship.contract.lines.reading_lines import is_longer
from tuneship.contract.lines.row_values import from_text, structured, without_nulls
from tuneship.contract.lines.tool_lines import (
    call_id,
    calls_of,
    calls_of_text,
    check_calls,
    comes_from_arrow,
    read_tools,
)

ROLES = ("system", "user", "assistant", "tool")
LINE_LIMIT_BYTES = 8 << 20


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
    if is_longer(line, LINE_LIMIT_BYTES):
        raise ExampleProblem("line_too_long", None, "is longer than 8 MiB")
    try:
        value = strict_json.parse(line, strict_json.MAXIMUM_VALUES_OF_LINE)
    except strict_json.JsonRefused as error:
        # The codes of the reports are published, and have none of their own for U+0000.
        code = "invalid_utf8" if error.fault == "nul" else error.fault
        raise ExampleProblem(code, None, error.message) from None
    if not isinstance(value, dict):
        raise ExampleProblem("not_object", None, "must be a JSON object")
    return cast("dict[str, Any]", value)


def parse_example(line: Mapping[str, Any], dataset_format: DatasetFormat) -> list[Message]:
    """Normalise one decoded line into messages; `tools_of` has its functions. Raises `ExampleProblem`."""
    return [turn.message for turn in _turns(line, dataset_format)]


def text_places(line: Mapping[str, Any], dataset_format: DatasetFormat) -> list[str]:
    """The field of each message's text in a good line."""
    return [turn.text_place for turn in _turns(line, dataset_format)]


class _Turn(NamedTuple):
    message: Message
    place: str
    text_place: str


def _turns(line: Mapping[str, Any], dataset_format: DatasetFormat) -> list[_Turn]:
    return _conversation(line) if dataset_format == "conversation" else _instruction(line)


def _instruction(line: Mapping[str, Any]) -> list[_Turn]:
    if any(name in line and line[name] is not None for name in ("messages", "conversations")):
        raise ExampleProblem("mixed_format", "messages", "belongs to the format conversation")
    instruction = _required(line, "instruction")
    response = _required(line, "response")
    system = _optional(line, "system")
    context = _optional(line, "input")
    structured(line.get("metadata"), "metadata", dict)
    first, *rest = instruction_messages(instruction, system=system, context=context)
    turns = [_Turn(first, "system", "system")] if rest else []
    turns += _history(line)
    turns.append(_Turn(rest[0] if rest else first, "instruction", "instruction"))
    return [*turns, _Turn({"role": "assistant", "content": response}, "response", "response")]


def _history(line: Mapping[str, Any]) -> Iterator[_Turn]:
    """Alpaca's earlier turns: a list of pairs of question and answer."""
    pairs: list[object] = structured(line.get("history"), "history", list) or []
    for number, pair in enumerate(pairs):
        place = f"history[{number}]"
        texts = cast("Sequence[object]", pair) if isinstance(pair, list | tuple) else ()
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise ExampleProblem("wrong_type", place, "must be a question and its answer, as texts")
        for at, role in enumerate(("user", "assistant")):
            message: Message = {"role": role, "content": cast("str", texts[at])}
            yield _Turn(message, f"{place}[{at}]", f"{place}[{at}]")


def instruction_messages(instruction: str, *, system: str = "", context: str = "") -> list[Message]:
    """The messages before the answer: the optional system turn, and instruction plus optional input as user turn."""
    user = f"{instruction}\n\n{context}" if context else instruction
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": user}]


def _required(line: Mapping[str, Any], field: str) -> str:
    name = chosen_alias(line, field)
    if name is None:
        raise ExampleProblem("missing_field", field, "is required")
    if name == "prompt" and isinstance(line[name], list):
        text = "is a list of turns, and so belongs to the format conversation"
        raise ExampleProblem("mixed_format", name, text)
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


def _conversation(line: Mapping[str, Any]) -> list[_Turn]:
    field, listed = _listed_turns(line)
    tools = read_tools(line)
    last = len(listed) - 1
    turns = [
        _turn(turn, place, is_last=number == last) for number, (turn, place) in enumerate(listed)
    ]
    if field == "prompt":
        # Only the completion is learnt, as other trainers have it.
        for turn in turns:
            if turn.place.startswith("prompt") and turn.message["role"] == "assistant":
                turn.message["weight"] = 0
    _check_turns(turns, field)
    check_calls([turn.message for turn in turns], tools, [turn.place for turn in turns])
    if comes_from_arrow(tools):
        for turn in turns:
            if "tool_calls" in turn.message:
                turn.message["tool_calls"] = without_nulls(turn.message["tool_calls"])
    return _with_system(turns, _optional(line, "system"))


def _listed_turns(line: Mapping[str, Any]) -> tuple[str, list[tuple[object, str]]]:
    """The field that has the turns, and each turn with its place."""
    field = next((name for name in ("conversations", "messages") if line.get(name) is not None), "")
    if not field and isinstance(line.get("prompt"), list):
        parts: dict[str, Any] = {name: line.get(name) for name in ("prompt", "completion")}
        if parts["completion"] is None:
            raise ExampleProblem("missing_field", "completion", "is required")
        if isinstance(parts["completion"], str):
            parts["completion"] = [{"role": "assistant", "content": parts["completion"]}]
    elif field or "messages" in line or "conversations" in line:
        field = field or ("messages" if "messages" in line else "conversations")
        parts = {field: line[field]}
    elif any(alias in line for alias in ALIASES["instruction"]):
        raise ExampleProblem("mixed_format", "instruction", "belongs to the format instruction")
    else:
        raise ExampleProblem("missing_field", "messages", "is required")
    listed: list[tuple[object, str]] = []
    for name, value in parts.items():
        turns: list[object] | None = structured(value, name, list)
        if not turns:
            raise ExampleProblem("wrong_type", name, "must be a non-empty list")
        listed += [
            (from_text(turn) if isinstance(turn, str) else turn, f"{name}[{number}]")
            for number, turn in enumerate(turns)
        ]
    return field or "prompt", listed


def _check_turns(turns: Sequence[_Turn], field: str) -> None:
    """Raise `ExampleProblem` for turns that are no conversation to learn from."""
    roles = [turn.message["role"] for turn in turns]
    first = next((number for number, role in enumerate(roles) if role != "system"), 0)
    for number in range(first, len(roles)):
        # Between a question and its answer nothing but calls and their results may stand.
        if roles[number] == "system" and roles[number + 1 : number + 2] not in (
            ["user"],
            ["system"],
        ):
            key = "from" if turns[number].text_place.endswith("value") else "role"
            text = "system stands first, or before a turn of the user"
            raise ExampleProblem("invalid_role", f"{turns[number].place}.{key}", text)
    if "user" not in roles:
        raise ExampleProblem("missing_field", field, "needs at least one user turn")
    if roles[-1] != "assistant":
        raise ExampleProblem("no_assistant", field, "must end with an assistant turn")
    answers = [turn.message for turn in turns if turn.message["role"] == "assistant"]
    # Such an example has no token to learn from, and its loss would be 0 / 0.
    if all(answer.get("weight", 1) == 0 for answer in answers):
        raise ExampleProblem("no_assistant", field, "every assistant turn has weight 0")
    for before, turn in pairwise(turns):
        if "tool_calls" not in before.message or turn.message["role"] != "user":
            continue
        # A result with the wrong role, rather than a user who said nothing.
        if not turn.message["content"].strip():
            raise ExampleProblem("empty_value", turn.text_place, "must not be empty behind a call")


def _with_system(turns: Sequence[_Turn], system: str) -> list[_Turn]:
    """Put ShareGPT's field `system` before the turns, and join the system turns at the front, as in requests."""
    first = next(number for number, turn in enumerate(turns) if turn.message["role"] != "system")
    own = "\n\n".join(turn.message["content"] for turn in turns[:first])
    if system.strip() and own.strip() and own != system:
        text = "differs from the system turn of the conversation"
        raise ExampleProblem("invalid_role", "system", text)
    if first == 1:
        return [*turns]
    if not first and not system.strip():
        return [*turns]
    place = turns[0].text_place if first else "system"
    made = _Turn({"role": "system", "content": own if first else system}, place, place)
    return [made, *turns[first:]]


def _turn(turn: object, field: str, *, is_last: bool) -> _Turn:
    if not isinstance(turn, dict):
        raise ExampleProblem("wrong_type", field, "must be an object")
    fields = cast("dict[str, Any]", turn)
    is_sharegpt = field.startswith("conversations")
    # Some files have either list with the keys of the other.
    if fields.get("from") is not None or fields.get("role") is not None:
        is_sharegpt = fields.get("from") is not None
    role_key, text_key = ("from", "value") if is_sharegpt else ("role", "content")
    if role_key not in fields:
        raise ExampleProblem("missing_field", f"{field}.{role_key}", "is required")
    place = f"{field}.{text_key}"
    named: object = fields[role_key]
    if named in CALL_ROLES and isinstance(fields.get(text_key), str):
        calls = calls_of_text(fields[text_key], place)
        return _Turn({"role": "assistant", "content": "", "tool_calls": calls}, field, place)
    role = ROLE_NAMES.get(named, named) if isinstance(named, str) else named
    if role not in ROLES:
        raise ExampleProblem("invalid_role", f"{field}.{role_key}", f"must be one of {ROLES}")
    calls = calls_of(fields, field) if role == "assistant" else []
    content = _content(fields, place, text_key, has_calls=bool(calls), is_last=is_last)
    message: Message = {"role": cast("str", role), "content": content}
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message |= _result(fields, field)
    weight = fields.get("weight")
    if weight is not None:
        # `isinstance` would take a flag for a number.
        if type(weight) is not int or weight not in (0, 1):
            raise ExampleProblem("wrong_type", f"{field}.weight", "must be 0 or 1")
        message["weight"] = weight
    return _Turn(message, field, place)


def _content(
    fields: Mapping[str, Any], field: str, key: str, *, has_calls: bool, is_last: bool
) -> str:
    """The text of a turn; only beside calls, or in a turn that is not the last, may it be empty."""
    value = fields.get(key)
    if has_calls and value is None:
        return ""
    if key not in fields:
        raise ExampleProblem("missing_field", field, "is required")
    if isinstance(value, list):
        value = _joined(cast("list[object]", value), field)
    if isinstance(value, str) and (has_calls or not is_last):
        return value
    return _text(value, field)


def _joined(parts: Sequence[object], field: str) -> str:
    """The text of a content in parts, as a request may have it."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            text = "must be a part of type text"
            raise ExampleProblem("wrong_type", f"{field}[{number}]", text)
        texts.append(fields["text"])
    return "".join(texts)


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
