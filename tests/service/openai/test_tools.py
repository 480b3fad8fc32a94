"""Programs of the `openai` package give functions to models, in chats and in responses, whole and streamed."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.service.generation.test_structured import encoded
from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import ANSWER, Service
from tuneship.serving.sampling.grammar import accepts

SECRET = "zq planted text 7731"
MESSAGES: Any = [{"role": "user", "content": "Is H25 valid?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": "Find a code.", "parameters": PARAMETERS},
}
OTHER: Any = {"type": "function", "function": {"name": "explain", "strict": True}}
FLAT: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Find a code.",
    "parameters": PARAMETERS,
    "strict": True,
}
ARGUMENTS = '{"code": "H25"}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
TWO = CALL + '\n<tool_call>\n{"name": "explain", "arguments": {}}\n</tool_call>'


class LookUp(BaseModel):
    """Find a code."""

    code: str


@pytest.fixture
def writes(answering: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that says what the replicas write."""

    def let(text: str) -> None:
        monkeypatch.setattr(answering.engines, "answer", encoded(text))

    return let


def newest(service: Service) -> tuple[str, str | None]:
    """The prompt and the grammar of the newest request to a replica."""
    tokenizer: Any = service.parts.catalogue.default.tokenizer
    frame = service.engines.asked[-1]
    return tokenizer.decode(frame["tokens"], skip_special_tokens=False), frame["grammar"]


def test_a_call_comes_back_and_its_result_goes_on(
    client: openai.OpenAI, answering: Service, writes: Any
) -> None:
    writes("I look.\n" + TWO)
    first = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, tools=[TOOL, OTHER], tool_choice="auto"
    )
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    calls: Any = choice.message.tool_calls
    assert [(one.type, one.function.name, one.function.arguments) for one in calls] == [
        ("function", "look_up", ARGUMENTS),
        ("function", "explain", "{}"),
    ]
    writes(ANSWER)
    results = [{"role": "tool", "tool_call_id": one.id, "content": "yes"} for one in calls]
    second = client.chat.completions.create(
        model=ENDPOINT, messages=[*MESSAGES, choice.message, *results], tools=[TOOL, OTHER]
    )
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", ANSWER)
    prompt, _ = newest(answering)
    assert "I look.\n" + TWO in prompt
    assert prompt.count("<tool_response>\nyes\n</tool_response>") == 2


def test_an_answer_of_calls_alone_has_no_content(client: openai.OpenAI, writes: Any) -> None:
    writes(CALL)
    answer = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, n=2, tools=[TOOL], tool_choice="required"
    )
    assert [one.message.content for one in answer.choices] == [None, None]
    ids = [call.id for one in answer.choices for call in one.message.tool_calls or ()]
    assert len({*ids}) == 2
    assert all(one.startswith("call_") for one in ids)


@pytest.mark.parametrize("text", ["", "I look.\n"])
def test_a_stream_tells_calls_piece_by_piece(client: openai.OpenAI, writes: Any, text: str) -> None:
    writes(text + TWO)
    chunks = list(
        client.chat.completions.create(
            model=ENDPOINT, messages=MESSAGES, tools=[TOOL, OTHER], stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == text.strip()
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    begun = [(one.index, one.type, one.function and one.function.name) for one in pieces if one.id]
    assert begun == [(0, "function", "look_up"), (1, "function", "explain")]
    written = ["", ""]
    for one in pieces:
        assert one.function is not None
        written[one.index] += one.function.arguments or ""
    assert written == [ARGUMENTS, "{}"]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_the_package_reads_arguments_into_classes(answering: Service, writes: Any) -> None:
    writes(CALL)
    tools: Any = [openai.pydantic_function_tool(LookUp, name="look_up")]
    # The package adds fields to an answer, which its strict validation does not know.
    with blocking(answering, _strict_response_validation=False) as lenient:
        parsed = lenient.chat.completions.parse(model=ENDPOINT, messages=MESSAGES, tools=tools)
        (call,) = parsed.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == LookUp(code="H25")
        with lenient.chat.completions.stream(
            model=ENDPOINT, messages=MESSAGES, tools=tools
        ) as stream:
            kinds = [event.type for event in stream]
            ended = stream.get_final_completion()
        (call,) = ended.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == LookUp(code="H25")
        assert "tool_calls.function.arguments.done" in kinds
        response = lenient.responses.parse(model=ENDPOINT, input="Is H25 valid?", tools=[FLAT])
        item: Any = response.output[0]
        assert item.parsed_arguments == {"code": "H25"}


NAMED: Any = {"type": "function", "function": {"name": "explain"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "look_up"}}],
    },
}
EXPLAIN = '<tool_call>\n{"name": "explain", "arguments": {}}\n</tool_call>'
CHOICES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"parallel_tool_calls": False}, ["hi", CALL], [TWO]),
    ({"tool_choice": NAMED}, [EXPLAIN], ["hi", CALL, EXPLAIN + "\n" + EXPLAIN]),
    ({"tool_choice": ALLOWED}, [CALL, CALL + "\n" + CALL], ["hi", EXPLAIN]),
]


def flat(choice: Any) -> Any:
    """The choice in the form of responses."""
    if not isinstance(choice, dict):
        return choice
    if "function" in choice:
        return {"type": "function", **choice["function"]}
    allowed = choice["allowed_tools"]
    tools = [{"type": "function", **one["function"]} for one in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}


@pytest.mark.parametrize(("more", "taken", "refused"), CHOICES, ids=map(str, range(len(CHOICES))))
def test_the_choice_decides_what_may_come_on_each_wire(
    client: openai.OpenAI, answering: Service, writes: Any, more: Any, taken: Any, refused: Any
) -> None:
    writes(taken[-1])
    client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, tools=[TOOL, OTHER], **more)
    prompt, grammar = newest(answering)
    assert grammar is not None
    assert [text for text in taken if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []
    assert "look_up" in prompt
    assert "explain" in prompt

    sent = {name: flat(value) for name, value in more.items()}
    tools: Any = [
        {"type": "function", **TOOL["function"]},
        {"type": "function", **OTHER["function"]},
    ]
    answer = client.responses.create(model=ENDPOINT, input=MESSAGES, tools=tools, **sent)
    assert newest(answering) == (prompt, grammar)
    assert json.loads(answer.to_json())["tool_choice"] == sent.get("tool_choice", "auto")
    assert answer.parallel_tool_calls is sent.get("parallel_tool_calls", True)


def test_with_none_a_call_is_text(client: openai.OpenAI, answering: Service, writes: Any) -> None:
    writes(CALL)
    answer = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, tools=[TOOL], tool_choice="none"
    )
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)
    assert "look_up" not in newest(answering)[0]


def test_a_response_holds_its_calls_and_takes_their_results(
    client: openai.OpenAI, answering: Service, writes: Any
) -> None:
    writes("I look.\n" + CALL)
    first = client.responses.create(model=ENDPOINT, input="Is H25 valid?", tools=[FLAT])
    message, call = first.output
    assert first.output_text == "I look."
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("look_up", ARGUMENTS, "completed")
    assert (call.id or "").startswith("fc_")
    assert json.loads(first.to_json())["tools"] == [FLAT]
    writes(ANSWER)
    items: list[Any] = [
        {"role": "user", "content": "Is H25 valid?"},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "yes"},
    ]
    second = client.responses.create(model=ENDPOINT, input=items, tools=[FLAT])
    assert second.output_text == ANSWER
    prompt, _ = newest(answering)
    assert "I look.\n" + CALL in prompt
    assert "<tool_response>\nyes\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("text", "kinds"), [("", ["function_call"] * 2), ("I look.\n", ["message", *["function_call"] * 2])]
)  # fmt: skip
def test_a_streamed_response_tells_items_one_after_another(
    client: openai.OpenAI, writes: Any, text: str, kinds: list[str]
) -> None:
    writes(text + TWO)
    tools: Any = [FLAT, {"type": "function", "name": "explain", "parameters": None, "strict": None}]
    with client.responses.stream(model=ENDPOINT, input="a", tools=tools) as stream:
        assert [item.type for item in stream.get_final_response().output] == kinds
    events: list[Any] = list(
        client.responses.create(model=ENDPOINT, input="a", tools=tools, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [one for one in events if one.type == "response.output_item.added"]
    done = [one for one in events if one.type == "response.output_item.done"]
    for ends in (added, done):
        assert [(one.output_index, one.item.type) for one in ends] == list(enumerate(kinds))
    assert [event.type for event in events if event in (*added, *done)] == [
        "response.output_item.added",
        "response.output_item.done",
    ] * len(kinds)
    written: dict[str, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            written[event.item_id] = written.get(event.item_id, "") + event.delta
    kind = "response.function_call_arguments.done"
    ended = {event.item_id: event.arguments for event in events if event.type == kind}
    assert written == ended
    assert list(ended.values()) == [ARGUMENTS, "{}"]
    final = events[-1].response
    assert [one.item for one in done] == final.output


def test_a_text_without_calls_is_streamed_as_ever(client: openai.OpenAI, writes: Any) -> None:
    writes(ANSWER)
    plain, offered = (
        [
            event.type
            for event in client.responses.create(
                model=ENDPOINT, input="a", stream=True, tools=tools
            )
        ]
        for tools in ([], [FLAT])
    )
    assert plain == offered


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_says_so(client: openai.OpenAI, writes: Any, stream: bool) -> None:
    writes(CALL)
    limit = len(encoded(CALL)) - 3
    asked: dict[str, Any] = {"model": ENDPOINT, "stream": stream}
    chat: Any = client.chat.completions.create(
        messages=MESSAGES, tools=[TOOL], max_completion_tokens=limit, **asked
    )
    last = [*chat][-1] if stream else chat
    assert last.choices[0].finish_reason == "length"
    answered: Any = client.responses.create(
        input="a", tools=[FLAT], max_output_tokens=limit, **asked
    )
    response = [*answered][-1].response if stream else answered
    assert response.status == "incomplete"
    (item,) = response.output
    assert (item.type, item.status) == ("function_call", "incomplete")
    assert ARGUMENTS.startswith(item.arguments)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def history(*messages: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, *messages]}


def calls(**changes: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [call | changes]}


RESULT = {"role": "tool", "tool_call_id": "c", "content": "yes"}
HERE = "tools[0].function"
UNFOLLOWED = {
    "type": "object",
    "properties": {SECRET: {"type": "string", "pattern": "(?=a)"}},
    "required": [SECRET],
}
OLDER = {"role": "assistant", "content": None, "function_call": {"name": SECRET}}
CUSTOM = {"type": "custom", "custom": {"name": SECRET}}
CHATS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1]"),
    ({"tools": [function(parameters={"type": "object", "not": {}})]}, "unsupported_value", f"{HERE}.parameters.not"),
    ({"tools": [function(parameters=UNFOLLOWED)]}, "invalid_value", f"{HERE}.parameters.properties[0]"),
    ({"tools": [CUSTOM]}, "unknown_parameter", "tools[0].custom"),
    ({"tools": [], "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": NAMED}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": CUSTOM}, "unsupported_parameter", "tool_choice.custom"),
    ({"tools": [TOOL], "tool_choice": SECRET}, "invalid_value", "tool_choice"),
    ({"parallel_tool_calls": SECRET}, "invalid_type", "parallel_tool_calls"),
    (history(calls()), "invalid_value", "messages"),
    (history(calls(), {"role": "tool", "content": SECRET}), "missing_required_parameter", "messages[2].tool_call_id"),
    (history({"role": "assistant"}, *MESSAGES), "missing_required_parameter", "messages[1].content"),
    (history(OLDER), "unsupported_parameter", "messages[1].function_call"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sent", "code", "param"), CHATS, ids=map(str, range(len(CHATS))))
def test_a_chat_is_refused_by_its_field_and_never_by_its_value(
    client: openai.OpenAI, sent: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    body = {"model": ENDPOINT, "messages": MESSAGES, "stream": stream} | sent
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=dict)
    assert (caught.value.code, caught.value.param) == (code, param), caught.value.body
    assert SECRET not in json.dumps(caught.value.body)


NEGATED = {"type": "object", "not": {}}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "yes"}
RESPONSES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": [{**FLAT, "parameters": NEGATED}]}, "unsupported_value", "tools[0].parameters.not"),
    ({"tools": [{"type": "web_search", "search_context_size": SECRET}]}, "unsupported_value", "tools[0].type"),
    ({"tools": [{**FLAT, "defer_loading": True}]}, "unsupported_parameter", "tools[0].defer_loading"),
    ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "other"}}, "invalid_value", "tool_choice"),
    ({"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "invalid_value", "tool_choice"),
    ({"input": [OUTPUT]}, "invalid_value", "input"),
    ({"input": [*MESSAGES, ITEM, *MESSAGES]}, "invalid_value", "input"),
    ({"input": [*MESSAGES, {**ITEM, "arguments": SECRET}, OUTPUT]}, "invalid_value", "input[1].arguments"),
    ({"input": [*MESSAGES, {**OUTPUT, "call_id": SECRET * 9}]}, "invalid_value", "input[1].call_id"),
    ({"input": [*MESSAGES, {**ITEM, "namespace": SECRET}, OUTPUT]}, "unsupported_parameter", "input[1].namespace"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "code", "param"), RESPONSES, ids=map(str, range(len(RESPONSES))))
def test_a_response_is_refused_by_its_field_and_never_by_its_value(
    client: openai.OpenAI, sent: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"model": ENDPOINT, "input": "a"} | sent
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body=body, cast_to=dict)
    assert (caught.value.code, caught.value.param) == (code, param), caught.value.body
    assert SECRET not in json.dumps(caught.value.body)
