"""Functions and calls in lines of datasets: what is read, and the errors for what is not."""

import copy
import json
from typing import Any

import pytest

from tuneship.contract.lines.dataset_lines import parse_example, text_of
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.tool_lines import tools_of

SECRET = "zq planted text 7731"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}},
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"b": [1, {"c": "ü"}], "a": null}'},
}
LINE: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "call_1", "name": "look_up"},
        {"role": "assistant", "content": "b"},
    ],
    "tools": [TOOL],
}


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """The line with another value at a place; `...` takes the place away."""
    line: Any = copy.deepcopy(LINE)
    place = line
    for part in path[:-1]:
        place = place[part]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return line


def test_arguments_become_objects_in_their_order() -> None:
    messages = parse_example(LINE, "conversation")
    function = {"name": "look_up", "arguments": {"b": [1, {"c": "ü"}], "a": None}}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert list(messages[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert messages[2] == {
        "role": "tool",
        "content": "",
        "tool_call_id": "call_1",
        "name": "look_up",
    }
    assert tools_of(LINE) == [TOOL]
    assert text_of(messages[1]) == "\n" + json.dumps(function, ensure_ascii=False)


CALLED = ["messages", 1, "tool_calls"]
CALLED_FUNCTION = [*CALLED, 0, "function"]
IN_CALL = "messages[1].tool_calls[0].function"
OLDER = {"role": "assistant", "content": None, "function_call": {}}


@pytest.mark.parametrize(
    "line",
    [
        changed(["tools"], ...),
        changed(["tools"], None),
        changed([*CALLED, 0, "type"], ...),
        changed([*CALLED, 0, "function", "arguments"], {"a": 1}),
        changed(["messages", 1, "content"], ...),
        changed(["messages", 1, "content"], ""),
        changed(["messages", 1, "content"], "I look."),
        changed(["messages", 2, "tool_call_id"], None),
        {**LINE, "messages": LINE["messages"][:2]},
        {"messages": [LINE["messages"][0], {"role": "tool", "content": "t"}, LINE["messages"][3]]},
    ],
)
def test_other_ways_to_write_it_are_taken(line: Any) -> None:
    assert parse_example(line, "conversation")


def test_sharegpt_turns_have_calls_and_results_as_well() -> None:
    roles = {"user": "human", "assistant": "gpt", "tool": "tool"}
    turns = [
        {"from": roles[turn["role"]], "value": turn["content"], **turn} for turn in LINE["messages"]
    ]
    for turn in turns:
        del turn["role"], turn["content"]
    line = {"conversations": turns, "tools": [TOOL]}
    assert parse_example(line, "conversation") == parse_example(LINE, "conversation")


FUNCTION = ["tools", 0, "function"]
REFUSED: list[tuple[Any, str, str]] = [
    (changed(["tools"], {}), "wrong_type", "tools"),
    (changed(["tools"], [TOOL] * 129), "invalid_tool", "tools"),
    (changed(["tools"], [TOOL, TOOL]), "invalid_tool", "tools[1].function.name"),
    (changed(["tools", 0], SECRET), "wrong_type", "tools[0]"),
    (changed(["tools", 0, "type"], "custom"), "invalid_tool", "tools[0].type"),
    (changed(FUNCTION, ...), "missing_field", "tools[0].function"),
    (changed([*FUNCTION, "name"], ...), "missing_field", "tools[0].function.name"),
    (changed([*FUNCTION, "name"], SECRET), "invalid_tool", "tools[0].function.name"),
    (changed([*FUNCTION, "name"], "look_up\n"), "invalid_tool", "tools[0].function.name"),
    (changed([*FUNCTION, "description"], 3), "wrong_type", "tools[0].function.description"),
    (changed([*FUNCTION, "parameters"], []), "wrong_type", "tools[0].function.parameters"),
    (changed(CALLED, {}), "wrong_type", "messages[1].tool_calls"),
    (changed(CALLED, [CALL] * 129), "invalid_tool_call", "messages[1].tool_calls"),
    (changed(CALLED, [CALL, CALL]), "invalid_tool_call", "messages[1].tool_calls[1].id"),
    (changed([*CALLED, 0], SECRET), "wrong_type", "messages[1].tool_calls[0]"),
    (changed([*CALLED, 0, "id"], 3), "wrong_type", "messages[1].tool_calls[0].id"),
    (changed([*CALLED, 0, "id"], ""), "invalid_tool_call", "messages[1].tool_calls[0].id"),
    (changed([*CALLED, 0, "type"], "custom"), "invalid_tool_call", "messages[1].tool_calls[0].type"),
    (changed([*CALLED_FUNCTION, "name"], "other"), "invalid_tool_call", f"{IN_CALL}.name"),
    (changed([*CALLED_FUNCTION, "arguments"], ...), "missing_field", f"{IN_CALL}.arguments"),
    *(
        (changed([*CALLED_FUNCTION, "arguments"], text), "invalid_tool_call", f"{IN_CALL}.arguments")
        for text in ('{"a": ', "[1]", '{"a": 1, "a": 2}', '{"a": NaN}', "", 3, "[" * 5000)
    ),
    (changed(["messages", 1], OLDER), "invalid_tool_call", "messages[1].function_call"),
    (changed(["messages", 1], {"role": "assistant", "content": None}), "wrong_type", "messages[1].content"),
    (changed(["messages", 2, "tool_call_id"], SECRET), "invalid_tool_call", "messages[2].tool_call_id"),
    (changed(["messages", 2, "tool_call_id"], 3), "wrong_type", "messages[2].tool_call_id"),
    (changed(["messages", 2], ...), "invalid_tool_call", "messages[1].tool_calls"),
    (changed(["messages", 2, "role"], "user") | {"tools": None}, "empty_value", "messages[2].content"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "field"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_a_line_is_refused_by_its_field_and_never_by_its_text(
    line: Any, code: str, field: str
) -> None:
    with pytest.raises(ExampleProblem) as caught:
        parse_example(line, "conversation")
    assert (caught.value.code, caught.value.field) == (code, field)
    assert SECRET not in caught.value.message
