"""The names of a line's fields, the names that other files use for them, and fields that are ignored. Pure.

Next: `dataset_lines.py`, which reads them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.row_values import structured

DatasetFormat = Literal["instruction", "conversation"]
# What other tools call these fields: their files need no conversion.
ALIASES = {
    "instruction": ("instruction", "prompt", "question"),
    "response": ("response", "completion", "output", "answer"),
}
# Fields whose values are no text but lists or objects.
STRUCTURED_FIELDS = ("messages", "conversations", "tools", "functions", "history", "metadata")
# Every field that a line may have; others are ignored.
FIELDS = (*ALIASES["instruction"], *ALIASES["response"], "system", "input", *STRUCTURED_FIELDS)
# What other files call the roles.
ROLE_NAMES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "developer": "system",
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
}
# ShareGPT's turns of the assistant whose text is a call, as JSON.
CALL_ROLES = ("function_call", "tool_call")
# Names of roles that need no word of their own: whoever has them has ShareGPT's turns.
USUAL_ROLES = frozenset({"human", "gpt"})
TURN_FIELDS = frozenset({"role", "content", "from", "value", "weight"})
OF_A_ROLE = {
    "assistant": TURN_FIELDS | {"tool_calls", "function_call"},
    "tool": TURN_FIELDS | {"tool_call_id", "name"},
}


def chosen_alias(line: Mapping[str, Any], field: str) -> str | None:
    """The name under which a line has a field: the first alias whose value is not null."""
    names = [name for name in ALIASES[field] if name in line]
    return next((name for name in names if line[name] is not None), names[0] if names else None)


def format_of(line: Mapping[str, Any]) -> DatasetFormat:
    """The format of a line, by its fields; `conversation` if the fields do not decide it."""
    fields = {name for name, value in line.items() if value is not None}
    if fields & {"messages", "conversations"} or isinstance(line.get("prompt"), list):
        return "conversation"
    return "instruction" if fields else "conversation"


def other_names(line: Mapping[str, Any], dataset_format: DatasetFormat) -> list[str]:
    """Names that a good line uses instead of the format's own, e.g. `prompt` for `instruction`."""
    if dataset_format == "instruction":
        chosen = (chosen_alias(line, field) for field in ALIASES)
        names = [name for name in chosen if name is not None and name not in ALIASES]
        return [*names, *(["history"] if _says_something(line.get("history")) else [])]
    names = [name for name in ("conversations", "functions") if _says_something(line.get(name))]
    if _says_something(line.get("system")):
        names.append("system")
    for field, turns in _turns(line):
        if field == "prompt":
            names.append("prompt[]")
        for turn in turns:
            role = _role(turn)
            if role in CALL_ROLES or (role in ROLE_NAMES and role not in USUAL_ROLES):
                names.append(f"role {role}")
            if turn.get("function_call") is not None:
                names.append("function_call")
    return list(dict.fromkeys(names))


def unused_fields(line: Mapping[str, Any], dataset_format: DatasetFormat) -> set[str]:
    """The fields of a good line that nobody reads. One that is null or empty says nothing, and is left out."""
    if dataset_format == "instruction":
        read = {"system", "input", "history", "metadata"}
        read.update(name for field in ALIASES if (name := chosen_alias(line, field)))
        return {name for name in line.keys() - read if _says_something(line[name])}
    found: set[str] = set()
    read = {"tools", "functions", "system", "metadata"}
    for field, turns in _turns(line):
        read.add(field)
        for turn in turns:
            if turn.keys() <= TURN_FIELDS:
                continue
            role = _role(turn)
            known = OF_A_ROLE.get(ROLE_NAMES.get(role, role), TURN_FIELDS)
            found.update(
                f"{field}[].{name}" for name in turn.keys() - known if _says_something(turn[name])
            )
    return found | {name for name in line.keys() - read if _says_something(line[name])}


def _turns(line: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The fields that hold the turns of a conversation, each with its turns that are objects."""
    fields = [name for name in ("conversations", "messages") if line.get(name) is not None][:1]
    for field in fields or ["prompt", "completion"]:
        try:
            turns: list[object] = structured(line.get(field), field, list) or []
        except ExampleProblem:  # the text of a completion
            turns = []
        yield field, [cast("dict[str, Any]", turn) for turn in turns if isinstance(turn, dict)]


def _role(turn: Mapping[str, Any]) -> str:
    role = turn.get("from") or turn.get("role")
    return role if isinstance(role, str) else ""


def _says_something(value: object) -> bool:
    return value is not None and value not in ("", [], {})
