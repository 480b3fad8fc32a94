"""Functions and calls in a line of a dataset, as OpenAI's fine-tuning files have them. Pure.

Arguments become objects, since that is what chat templates write. Problems name the field, never its text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tuneship.contract.example_problem import ExampleProblem
from tuneship.contract.tools import (
    FUNCTION_NAME,
    MAXIMUM_CALL_ID_CHARACTERS,
    MAXIMUM_CALLS,
    MAXIMUM_FUNCTIONS,
    arguments_of,
    fault_of_calls,
)


def tools_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions of a line. Raises `ExampleProblem`."""
    tools = line.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ExampleProblem("wrong_type", "tools", "must be a list")
    listed = cast("list[object]", tools)
    if len(listed) > MAXIMUM_FUNCTIONS:
        text = f"must have at most {MAXIMUM_FUNCTIONS} functions"
        raise ExampleProblem("invalid_tool", "tools", text)
    names: set[str] = set()
    for number, tool in enumerate(listed):
        field = f"tools[{number}]"
        fields = _object(tool, field)
        if fields.get("type") != "function":
            raise ExampleProblem("invalid_tool", f"{field}.type", "must be function")
        function = _object(fields.get("function"), f"{field}.function")
        if not isinstance(function.get("description"), str | None):
            raise ExampleProblem("wrong_type", f"{field}.function.description", "must be a string")
        if not isinstance(function.get("parameters"), dict | None):
            raise ExampleProblem("wrong_type", f"{field}.function.parameters", "must be an object")
        name = _name(function, f"{field}.function.name")
        if name in names:
            text = "is the name of an earlier function"
            raise ExampleProblem("invalid_tool", f"{field}.function.name", text)
        names.add(name)
    return cast("list[dict[str, Any]]", listed)


def calls_of(turn: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """The calls of an assistant's turn. Raises `ExampleProblem`."""
    if turn.get("function_call") is not None:
        text = "is the older form of tool_calls"
        raise ExampleProblem("invalid_tool_call", f"{field}.function_call", text)
    calls = turn.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ExampleProblem("wrong_type", f"{field}.tool_calls", "must be a list")
    listed = cast("list[object]", calls)
    if len(listed) > MAXIMUM_CALLS:
        text = f"must have at most {MAXIMUM_CALLS} calls"
        raise ExampleProblem("invalid_tool_call", f"{field}.tool_calls", text)
    made: list[dict[str, Any]] = []
    for number, call in enumerate(listed):
        place = f"{field}.tool_calls[{number}]"
        fields = _object(call, place)
        if fields.get("type", "function") != "function":
            raise ExampleProblem("invalid_tool_call", f"{place}.type", "must be function")
        function = _object(fields.get("function"), f"{place}.function")
        name = _name(function, f"{place}.function.name", "invalid_tool_call")
        if "arguments" not in function:
            raise ExampleProblem("missing_field", f"{place}.function.arguments", "is required")
        arguments: object = function["arguments"]
        if isinstance(arguments, str):
            arguments = arguments_of(arguments)
        if not isinstance(arguments, dict):
            text = "must be a JSON object, or one as text"
            raise ExampleProblem("invalid_tool_call", f"{place}.function.arguments", text)
        identifier = call_id(fields.get("id"), f"{place}.id")
        one: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        made.append(one if identifier is None else {"id": identifier, **one})
    return made


def call_id(value: object, field: str) -> str | None:
    """The id of a call, or of the call that a result belongs to. Raises `ExampleProblem`."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ExampleProblem("wrong_type", field, "must be a string")
    if not 1 <= len(value) <= MAXIMUM_CALL_ID_CHARACTERS:
        text = f"must have 1 to {MAXIMUM_CALL_ID_CHARACTERS} characters"
        raise ExampleProblem("invalid_tool_call", field, text)
    return value


def check_calls(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], field: str
) -> None:
    """Raise `ExampleProblem` for calls of no listed function, and for calls and results that do not belong together."""
    names = {tool["function"]["name"] for tool in tools}
    for number, turn in enumerate(turns if names else ()):
        for place, call in enumerate(turn.get("tool_calls", ())):
            if call["function"]["name"] not in names:
                at = f"{field}[{number}].tool_calls[{place}].function.name"
                raise ExampleProblem("invalid_tool_call", at, "is no function of tools")
    fault = fault_of_calls(turns)
    if fault is not None:
        at = f"{field}[{fault.turn}]{fault.field}"
        raise ExampleProblem("invalid_tool_call", at, fault.message)


def _object(value: object, field: str) -> Mapping[str, Any]:
    if value is None:
        raise ExampleProblem("missing_field", field, "is required")
    if not isinstance(value, dict):
        raise ExampleProblem("wrong_type", field, "must be an object")
    return cast("dict[str, Any]", value)


def _name(function: Mapping[str, Any], field: str, code: str = "invalid_tool") -> str:
    name = function.get("name")
    if name is None:
        raise ExampleProblem("missing_field", field, "is required")
    if not isinstance(name, str) or not FUNCTION_NAME.match(name):
        text = "must have 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
        raise ExampleProblem(code, field, text)
    return name
