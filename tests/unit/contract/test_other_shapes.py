"""Lines of other tools are read as the lines of OpenAI that say the same, and fields that nobody reads are known."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.contract.lines.dataset_lines import (
    other_names,
    parse_example,
    parse_line,
    text_of,
    text_places,
)
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.line_fields import DatasetFormat, format_of, unused_fields
from tuneship.contract.lines.tool_lines import tools_of

SECRET = "the patient's own words"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "d", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"name": "weather", "arguments": {"city": "Rome", "day": None}}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "content": "sunny"}
# The line of OpenAI that the others must equal.
LINE: dict[str, Any] = {"messages": [USER, CALLING, RESULT, ANSWER], "tools": TOOLS}
SHAREGPT_CALLING = [
    {"from": "human", "value": "a"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "sunny"},
    {"from": "gpt", "value": "b"},
]


def with_turn(number: int, **fields: Any) -> dict[str, Any]:
    """The line with other fields in one turn; `None` takes a field away."""
    line = copy.deepcopy(LINE)
    turn = line["messages"][number] | fields
    line["messages"][number] = {name: one for name, one in turn.items() if one is not None}
    return line


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": SHAREGPT_CALLING, "tools": json.dumps([FUNCTION])},
        {"conversations": json.dumps(SHAREGPT_CALLING), "tools": TOOLS},
        {"conversations": LINE["messages"], "tools": TOOLS},
        {"messages": SHAREGPT_CALLING, "conversations": None, "tools": TOOLS},
        {"messages": json.dumps(LINE["messages"]), "tools": json.dumps(TOOLS)},
        {**LINE, "tools": [json.dumps(TOOLS[0])], "functions": None},
        {**LINE, "tools": [{"type": "function", **FUNCTION}]},
        {**LINE, "tools": [{"type": None, "function": {**FUNCTION, "parameters": json.dumps(PARAMETERS)}}]},
        {**LINE, "tools": [], "functions": [FUNCTION]},
        with_turn(1, tool_calls=[CALL]),
        with_turn(1, tool_calls=json.dumps(CALLING["tool_calls"])),
        with_turn(1, tool_calls=[{"type": None, "id": None, "function": CALL}]),
        with_turn(1, tool_calls=None, function_call=CALL),
        with_turn(1, tool_calls=None, function_call={**CALL, "arguments": json.dumps(CALL["arguments"])}),
        with_turn(2, role="function"),
        with_turn(3, content=[{"type": "text", "text": "b"}]),
    ],
)  # fmt: skip
def test_a_line_in_another_shape_says_the_same(line: dict[str, Any]) -> None:
    assert parse_example(line, "conversation") == parse_example(LINE, "conversation")
    assert tools_of(line) == TOOLS
    assert format_of(line) == "conversation"


@pytest.mark.parametrize(
    ("line", "dataset_format", "turns"),
    [
        (
            {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "conversation",
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"system": "s", "messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
            "conversation",
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"messages": [{"role": "developer", "content": "s"}, {"role": "system", "content": "t"}, USER, ANSWER]},
            "conversation",
            [("system", "s\n\nt"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"messages": [USER, ANSWER, {"role": "system", "content": "s"}, USER, ANSWER], "system": " "},
            "conversation",
            [("user", "a"), ("assistant", "b"), ("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER, ANSWER]},
            "conversation",
            [("user", ""), ("assistant", ""), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"instruction": "c", "input": "", "output": "d", "system": "s", "history": [["a", "b"], ["e", ""]]},
            "instruction",
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "e"), ("assistant", ""),
             ("user", "c"), ("assistant", "d")],
        ),
        (
            {"instruction": "a", "output": "b", "history": "[]", "metadata": '{"x": 1}'},
            "instruction",
            [("user", "a"), ("assistant", "b")],
        ),
        (
            {"instruction": None, "prompt": "a", "response": None, "completion": "b", "messages": None},
            "instruction",
            [("user", "a"), ("assistant", "b")],
        ),
    ],
)  # fmt: skip
def test_other_ways_to_write_turns_are_taken(
    line: dict[str, Any], dataset_format: DatasetFormat, turns: list[tuple[str, str]]
) -> None:
    found = parse_example(line, dataset_format)
    assert [(turn["role"], turn["content"]) for turn in found] == turns
    assert len(text_places(line, dataset_format)) == len(turns)
    assert format_of(line) == dataset_format


def test_a_prompt_of_turns_is_not_learnt() -> None:
    prompt = [USER, ANSWER, USER]
    for completion in ([ANSWER], "b"):
        line = {"prompt": prompt, "completion": completion, "tools": TOOLS}
        assert parse_example(line, "conversation") == [USER, {**ANSWER, "weight": 0}, USER, ANSWER]
        assert format_of(line) == "conversation"
    assert text_places(line, "conversation")[2:] == ["prompt[2].content", "completion[0].content"]


@pytest.mark.parametrize(
    ("line", "dataset_format", "code", "field"),
    [
        ({"instruction": "a", "output": "b", "history": [[SECRET]]}, "instruction", "wrong_type", "history[0]"),
        ({"instruction": "a", "output": "b", "history": [[SECRET, 1]]}, "instruction", "wrong_type", "history[0]"),
        ({"instruction": "a", "output": "b", "history": SECRET}, "instruction", "wrong_type", "history"),
        ({"instruction": "a", "output": "b", "metadata": SECRET}, "instruction", "wrong_type", "metadata"),
        ({"prompt": [USER], "completion": [ANSWER]}, "instruction", "mixed_format", "prompt"),
        ({"prompt": [USER]}, "conversation", "missing_field", "completion"),
        ({**LINE, "tools": SECRET}, "conversation", "wrong_type", "tools"),
        ({**LINE, "functions": [FUNCTION]}, "conversation", "invalid_tool", "functions"),
        ({**LINE, "system": 3}, "conversation", "wrong_type", "system"),
        ({"messages": [{"role": "system", "content": SECRET}, USER, ANSWER], "system": "other"},
         "conversation", "invalid_role", "system"),
        ({"conversations": [USER, {"from": "function_call", "value": SECRET}]},
         "conversation", "invalid_tool_call", "conversations[1].value"),
        ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": SECRET}]}, ANSWER]},
         "conversation", "wrong_type", "messages[0].content[0]"),
        ({"messages": [USER, {**ANSWER, "content": ""}]}, "conversation", "empty_value", "messages[1].content"),
        (with_turn(1, function_call=CALL), "conversation", "invalid_tool_call", "messages[1].function_call"),
        (with_turn(2, role="user", content=" "), "conversation", "empty_value", "messages[2].content"),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be_read_is_refused_by_its_field(
    line: dict[str, Any], dataset_format: DatasetFormat, code: str, field: str
) -> None:
    with pytest.raises(ExampleProblem) as refused:
        parse_example(line, dataset_format)
    assert (refused.value.code, refused.value.field) == (code, field)
    assert SECRET not in refused.value.message


def test_a_null_that_somebody_wrote_stays() -> None:
    (_, calling, _, _) = parse_example(LINE, "conversation")
    assert calling.get("tool_calls", [])[0]["function"]["arguments"] == CALL["arguments"]
    city = {"type": ["string", "null"], "default": None, "examples": [{"properties": {"a": None}}]}
    schema = {"type": "object", "properties": {"city": city, "properties": city}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    assert tools_of({**LINE, "tools": tools}) == tools


# Numbers.

NUMBERS = st.integers() | st.integers(min_value=-(10**40), max_value=10**40)
NUMBERS |= st.floats(allow_nan=False, allow_infinity=False)


@given(number=NUMBERS, digits=st.integers(min_value=1, max_value=10**60))
def test_numbers_are_those_of_pythons_json(number: float, digits: int) -> None:
    for written in (
        json.dumps(number),
        f"0.{digits}",
        f"-{digits}",
        f"{digits}.0",
        f"{digits}e-70",
    ):
        arguments = f'{{"x": [{written}]}}'
        texts = [json.dumps(arguments), arguments]
        for text in texts:
            function = f'{{"name": "weather", "arguments": {text}}}'
            call = f'{{"role": "assistant", "tool_calls": [{{"function": {function}}}]}}'
            line = f'{{"messages": [{{"role": "user", "content": "a"}}, {call}]}}'
            turn = parse_line(line.encode(), "conversation")[1]
            right = {"name": "weather", "arguments": json.loads(arguments)}
            assert text_of(turn) == "\n" + json.dumps(right)


# Fields that are read by another name, and fields that nobody reads.


@pytest.mark.parametrize(
    ("line", "dataset_format", "names", "unused"),
    [
        (LINE, "conversation", [], set()),
        (
            {"conversations": SHAREGPT_CALLING, "system": "s", "tools": TOOLS, "id": "7", "source": ""},
            "conversation",
            ["conversations", "system", "role function_call", "role observation"],
            {"id"},
        ),
        (
            {"messages": [{**USER, "name": "Bob", "tool_calls": []}, {**ANSWER, "refusal": None, "annotations": [],
             "audio": None, "reasoning_content": "c"}], "conversations": None, "parallel_tool_calls": False},
            "conversation",
            [],
            {"messages[].name", "messages[].reasoning_content", "parallel_tool_calls"},
        ),
        (with_turn(2, role="function", name="weather"), "conversation", ["role function"], set()),
        ({"prompt": [USER], "completion": "b", "id": 0}, "conversation", ["prompt[]"], {"id"}),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]], "prompt": "e", "text": "f", "input": ""},
            "instruction",
            ["output", "history"],
            {"prompt", "text"},
        ),
        ({"prompt": "a", "completion": "b", "tools": TOOLS}, "instruction", ["prompt", "completion"], {"tools"}),
    ],
)  # fmt: skip
def test_other_names_and_unused_fields_are_known(
    line: Mapping[str, Any], dataset_format: DatasetFormat, names: list[str], unused: set[str]
) -> None:
    assert other_names(line, dataset_format) == names
    assert unused_fields(line, dataset_format) == unused
