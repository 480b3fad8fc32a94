"""Functions and calls in a line of a dataset, as OpenAI's fine-tuning files and ShareGPT have them. Pure.

Arguments become objects, since that is what chat templates write. Problems name the field, never its text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.row_values import (
    from_text,
    has_null_property,
    structured,
    without_nulls,
)
from tuneship.contract.schemas.tools import (
    FUNCTION_NAME,
    MAXIMUM_CALL_ID_CHARACTERS,
    MAXIMUM_CALLS,
    MAXIMUM_FUNCTIONS,
    arguments_of,
    fault_of_calls,
)


def tools_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions of a line. Raises `ExampleProblem`."""
    tools = read_tools(line)
    return without_nulls(tools) if comes_from_arrow(tools) else tools


def comes_from_arrow(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the functions, and so the calls, have null values for keys of other rows, as Arrow writes them."""
    return any(has_null_property(tool["function"].get("parameters")) for tool in tools)


def read_tools(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions of a line with every null that they have. Raises `ExampleProblem`."""
    place = "tools"
    listed: list[object] = structured(line.get("tools"), place, list) or []
    if line.get("functions") is not None:
        if listed:
            raise ExampleProblem("invalid_tool", "functions", "is the older form of tools")
        place = "functions"
        listed = structured(line["functions"], place, list) or []
    if len(listed) > MAXIMUM_FUNCTIONS:
        text = f"must have at most {MAXIMUM_FUNCTIONS} functions"
        raise ExampleProblem("invalid_tool", place, text)
    made = [_tool(tool, f"{place}[{number}]") for number, tool in enumerate(listed)]
    names: set[str] = set()
    for number, tool in enumerate(made):
        name = tool["function"]["name"]
        if name in names:
            text = "is the name of an earlier function"
            raise ExampleProblem("invalid_tool", f"{place}[{number}].function.name", text)
        names.add(name)
    return made


def _tool(tool: object, field: str) -> dict[str, Any]:
    """A function in OpenAI's form; one without the surrounding object gets it. Raises `ExampleProblem`."""
    if isinstance(tool, str):
        tool = from_text(tool)
    fields = _object(tool, field)
    if fields.get("type") not in (None, "function"):
        raise ExampleProblem("invalid_tool", f"{field}.type", "must be function")
    if fields.get("function") is None and "name" in fields:
        bare = {name: value for name, value in fields.items() if name not in ("type", "function")}
        fields = {"type": "function", "function": bare}
    elif fields.get("type") is None:
        fields = {**fields, "type": "function"}
    function = _object(fields.get("function"), f"{field}.function")
    if not isinstance(function.get("description"), str | None):
        raise ExampleProblem("wrong_type", f"{field}.function.description", "must be a string")
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        parameters = structured(parameters, f"{field}.function.parameters", dict)
        fields = {**fields, "function": {**function, "parameters": parameters}}
    elif not isinstance(parameters, dict | None):
        raise ExampleProblem("wrong_type", f"{field}.function.parameters", "must be an object")
    _name(function, f"{field}.function.name")
    return cast("dict[str, Any]", fields)


def calls_of(turn: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """The calls of an assistant's turn. Raises `ExampleProblem`."""
    listed: list[object] = structured(turn.get("tool_calls"), f"{field}.tool_calls", list) or []
    if turn.get("function_call") is not None:
        place, older = f"{field}.function_call", turn["function_call"]
        if listed:
            raise ExampleProblem("invalid_tool_call", place, "is the older form of tool_calls")
        if not isinstance(older, dict) or "name" not in older:
            text = "must be an object with name and arguments"
            raise ExampleProblem("invalid_tool_call", place, text)
        return [_call(cast("dict[str, Any]", older), None, place)]
    if len(listed) > MAXIMUM_CALLS:
        text = f"must have at most {MAXIMUM_CALLS} calls"
        raise ExampleProblem("invalid_tool_call", f"{field}.tool_calls", text)
    made: list[dict[str, Any]] = []
    for number, call in enumerate(listed):
        place = f"{field}.tool_calls[{number}]"
        fields = _object(call, place)
        if fields.get("type") not in (None, "function"):
            raise ExampleProblem("invalid_tool_call", f"{place}.type", "must be function")
        identifier = call_id(fields.get("id"), f"{place}.id")
        if fields.get("function") is None and "name" in fields:
            made.append(_call(fields, identifier, place))
        else:
            function = _object(fields.get("function"), f"{place}.function")
            made.append(_call(function, identifier, f"{place}.function"))
    return made


def calls_of_text(text: str, field: str) -> list[dict[str, Any]]:
    """The calls of a ShareGPT turn `function_call`: an object with name and arguments, or a list of them, as JSON.

    Raises `ExampleProblem`.
    """
    value = from_text(text)
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    if not listed or not all(isinstance(one, dict) and "name" in one for one in listed):
        text = "must be JSON with name and arguments, or a list of such"
        raise ExampleProblem("invalid_tool_call", field, text)
    return calls_of({"tool_calls": listed}, field)


def _call(function: Mapping[str, Any], identifier: str | None, field: str) -> dict[str, Any]:
    """A call with its arguments as an object. Raises `ExampleProblem`."""
    name = _name(function, f"{field}.name", "invalid_tool_call")
    if "arguments" not in function:
        raise ExampleProblem("missing_field", f"{field}.arguments", "is required")
    arguments: object = function["arguments"]
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    if not isinstance(arguments, dict):
        text = "must be a JSON object, or one as text"
        raise ExampleProblem("invalid_tool_call", f"{field}.arguments", text)
    one: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return one if identifier is None else {"id": identifier, **one}


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
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], places: Sequence[str]
) -> None:
    """Raise `ExampleProblem` for calls of no listed function, and for calls and results that do not belong together."""
    names = {tool["function"]["name"] for tool in tools}
    for number, turn in enumerate(turns if names else ()):
        for place, call in enumerate(turn.get("tool_calls", ())):
            if call["function"]["name"] not in names:
                at = f"{places[number]}.tool_calls[{place}].function.name"
                raise ExampleProblem("invalid_tool_call", at, "is no function of tools")
    fault = fault_of_calls(turns)
    if fault is not None:
        at = f"{places[fault.turn]}{fault.field}"
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
