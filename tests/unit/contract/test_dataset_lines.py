"""Tests of what a line of a dataset may hold, and of the errors for a line that holds something else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.contract.lines.dataset_lines import other_names, parse_example, parse_line
from tuneship.contract.lines.example_problem import ExampleProblem

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_an_instruction_becomes_turns() -> None:
    line = {"instruction": "a", "input": "c", "system": "s", "response": "b", "metadata": {"x": 1}}
    assert parse_example(line, "instruction") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nc"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ({"prompt": "a", "completion": "b"}, ["prompt", "completion"]),
        ({"question": "a", "answer": "b"}, ["question", "answer"]),
        ({"instruction": "a", "output": "b"}, ["output"]),
        ({"instruction": "a", "response": "b", "prompt": "not read"}, []),
    ],
)
def test_other_names_are_read_and_reported(line: dict[str, str], names: list[str]) -> None:
    assert parse_example(line, "instruction") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert other_names(line, "instruction") == names


def test_sharegpt_is_normalised() -> None:
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("tool", "t"), ("gpt", "c")]
    line = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert [(turn["role"], turn["content"]) for turn in parse_example(line, "conversation")] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("tool", "t"),
        ("assistant", "c"),
    ]
    assert other_names(line, "conversation") == ["conversations"]


def test_weights_are_taken() -> None:
    line = {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER], "tools": []}
    assert parse_example(line, "conversation")[1] == {**ANSWER, "weight": 0}


@pytest.mark.parametrize(
    ("line", "code", "field"),
    [
        ({"messages": [USER, ANSWER], "tools": {}}, "wrong_type", "tools"),
        ({"messages": {}}, "wrong_type", "messages"),
        ({"messages": []}, "wrong_type", "messages"),
        ({"messages": [USER, "b"]}, "wrong_type", "messages[1]"),
        ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "missing_field", "messages[0].role"),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, "empty_value", "messages[1].content"),
        ({"messages": [USER, {**ANSWER, "content": 1}]}, "wrong_type", "messages[1].content"),
        ({"messages": [USER, {**ANSWER, "weight": True}]}, "wrong_type", "messages[1].weight"),
        ({"messages": [USER, {**ANSWER, "weight": 1.0}]}, "wrong_type", "messages[1].weight"),
        ({"messages": [USER, {**ANSWER, "role": ["user"]}]}, "invalid_role", "messages[1].role"),
        ({"messages": [USER, {**USER, "role": "system"}]}, "invalid_role", "messages[1].role"),
        ({"messages": [USER]}, "no_assistant", "messages"),
        ({"messages": [ANSWER]}, "missing_field", "messages"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no_assistant", "messages"),
        ({"conversations": [{"from": "cat", "value": "a"}]}, "invalid_role", "conversations[0].from"),
        ({"prompt": "a", "completion": "b"}, "mixed_format", "instruction"),
        ({"text": "a"}, "missing_field", "messages"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_refused_by_code_and_field(
    line: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(ExampleProblem) as refused:
        parse_line(json.dumps(line).encode(), "conversation")
    assert (refused.value.code, refused.value.field) == (code, field)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
NAMES = ("instruction", "response", "prompt", "input", "system", "metadata", "messages", "tools")
TURNS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", "system"]), "content": VALUES}
    ),
    max_size=4,
)
LINES = st.dictionaries(st.sampled_from(NAMES), VALUES | TURNS, max_size=4)


def problem_of(data: bytes, dataset_format: Any) -> ExampleProblem | None:
    try:
        parse_line(data, dataset_format)
    except ExampleProblem as problem:
        return problem
    return None


@given(line=LINES, dataset_format=st.sampled_from(["instruction", "conversation"]))
def test_any_line_is_an_example_to_learn_from_or_a_problem_without_its_text(
    line: dict[str, Any], dataset_format: Any
) -> None:
    data = json.dumps(line).encode()
    problem = problem_of(data, dataset_format)
    if problem is not None:
        long_texts = {one for one in line.values() if isinstance(one, str) and len(one) > 7}
        assert not any(text in problem.message for text in long_texts)
        return
    turns = parse_line(data, dataset_format)
    assert turns[-1]["role"] == "assistant"
    assert any(turn["role"] == "user" for turn in turns)
    assert turns[-1]["content"].strip()


@given(data=st.binary(max_size=40))
def test_any_bytes_that_are_no_example_have_a_code(data: bytes) -> None:
    problem = problem_of(data, "instruction")
    assert problem is not None
    assert problem.code in {"invalid_utf8", "invalid_json", "not_object", "missing_field"}
