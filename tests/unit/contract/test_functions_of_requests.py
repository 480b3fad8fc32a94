"""Functions in a generation: what fits together, and the place of what does not."""

from typing import Any

import pytest
from pydantic import ValidationError

from tuneship.contract.generation import Generate
from tuneship.contract.schemas.tools import MAXIMUM_FUNCTIONS

SECRET = "zq planted text 7731"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"code": {"type": "string"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "d", "parameters": PARAMETERS},
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"code": "H25"}'},
}
ASKED = {"role": "user", "content": "a"}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "b", "tool_call_id": "call_1"}


def body(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns or (ASKED,)), "tools": [TOOL], **more}


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **changes}}


def large(name: str) -> dict[str, Any]:
    """A function whose schema has 40,000 bytes, and half as many characters."""
    properties = {"a": {"const": "é" * 20_000}}
    return function(name=name, parameters={"type": "object", "properties": properties})


def wide(name: str) -> dict[str, Any]:
    properties: dict[str, Any] = {f"a{number}": {} for number in range(200)}
    return function(name=name, parameters={"type": "object", "properties": properties})


def test_turns_and_functions_are_written_as_templates_want_them() -> None:
    read = Generate.model_validate(body(ASKED, CALLED, RESULT, ASKED))
    assert read.messages is not None
    assert read.tools is not None
    called = read.messages[1].for_the_template
    assert (called["content"], called["tool_calls"][0]["function"]["arguments"]) == (
        "",
        {"code": "H25"},
    )
    assert read.messages[2].for_the_template["tool_call_id"] == "call_1"
    assert read.tools[0].for_the_template == TOOL


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["look_up", "explain"]),
        ({"tool_choice": "none"}, []),
        ({"tool_choice": "required", "allowed_tools": ["explain"]}, ["explain"]),
    ],
)
def test_callable_functions_are_those_the_request_allows(
    more: dict[str, Any], names: list[str]
) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "explain"}}]
    read = Generate.model_validate({**body(), "tools": tools, **more})
    assert [tool.function.name for tool in read.callable_tools] == names


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (body(allowed_tools=["gone"]), "is no function of tools"),
        ({"messages": [ASKED], "tool_choice": "required"}, "needs tools"),
        ({"prompt": "a", "raw": True, "tools": [TOOL]}, "a prompt that is rendered"),
        (body(tools=[TOOL, TOOL]), "is the name of an earlier function"),
        (body(tools=[TOOL] * (MAXIMUM_FUNCTIONS + 1)), "at most 128 items"),
        (body(tools=[function(name="no name")]), "pattern"),
        (body(tools=[function(parameters={"type": "array"})]), "must be object"),
        (body(tools=[function(parameters={"type": "object", "if": {}})]), "support"),
        (body(tools=[large("f"), large("g")]), "at most 65536 bytes of schemas together"),
        (body(tools=[*map(wide, "fgh")]), "at most 500 schemas within all functions"),
        (body({**ASKED, "tool_calls": [CALL]}), "belongs to the role assistant"),
        (body({**ASKED, "tool_call_id": "call_1"}), "belongs to the role tool"),
        (body({"role": "assistant"}, ASKED), "is required"),
        (body(ASKED, CALLED), "must not end with a turn of the model"),
        (body(ASKED, RESULT), "names no call that waits for its result"),
        (body(ASKED, CALLED, ASKED), "must each have a result"),
        (body(ASKED, {**CALLED, "tool_calls": [CALL, CALL]}, RESULT), "is the id of another call"),
        (body(ASKED, prompt="a"), "must not be sent beside a prompt"),
        (body(prompt_token_ids=[1]), "must not be sent beside a prompt or messages"),
        (body(raw=True), "must not be sent beside messages"),
        ({"prompt": "a", "prompt_logprobs": True}, "needs logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "only with prompt_logprobs"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "is required"),
        ({"prompt": "a", "response_format": {"type": "text", "schema": {}}}, "needs the type"),
        ({}, "is required"),
    ],
)
def test_fields_that_contradict_each_other_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Generate.model_validate(wrong)


@pytest.mark.parametrize("arguments", [SECRET, f'["{SECRET}"]', f'{{"a": "{SECRET}"'])
def test_arguments_that_are_no_object_are_refused_without_their_text(arguments: str) -> None:
    call = {**CALL, "function": {"name": "look_up", "arguments": arguments}}
    with pytest.raises(ValidationError, match="must be a JSON object as text") as refusal:
        Generate.model_validate(body(ASKED, {**CALLED, "tool_calls": [call]}, RESULT))
    assert SECRET not in str([{**one, "input": None} for one in refusal.value.errors()])
