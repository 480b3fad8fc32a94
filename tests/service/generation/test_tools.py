"""Functions that a model may call, through the main API: what it reads, what comes back, what is refused."""

import json
from typing import Any

import pytest

from tests.service.generation.test_generation import path_of, rendered
from tests.service.generation.test_generation_streams import events_of
from tests.service.generation.test_structured import encoded
from tests.support.service.in_process import ANSWER, Service
from tuneship.prompts.template import PromptTemplate
from tuneship.serving.sampling.grammar import accepts

PLANTED = "zq planted text 7731"
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Find a code.", "parameters": PARAMETERS},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "explain"}}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Is H25 valid?"}],
    "tools": [TOOL, OTHER],
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"code": "H25"}}\n</tool_call>'
EXPLAIN = '<tool_call>\n{"name": "explain", "arguments": {}}\n</tool_call>'
TWO = f"{CALL}\n{EXPLAIN}"


def ask(service: Service, body: Any, answer: str = ANSWER, **more: Any) -> Any:
    service.engines.answer = encoded(answer)
    path = path_of(service.deployment(f"tools {len(service.engines.prompts)}", **more))
    return service.call("POST", path, json=body)


def grammar(service: Service) -> str | None:
    return service.engines.asked[-1]["grammar"]


def test_the_model_reads_the_functions_as_they_were_sent(service: Service) -> None:
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    assert ask(service, {**ASKED, "tools": [turned]}).status_code == 200
    text = rendered(service, 0)
    listed = json.dumps(turned["function"], separators=(",", ":"))
    assert listed in text
    assert text.index(listed) < text.index("Is H25 valid?")
    assert text.endswith("<|assistant|>")


def test_a_prompt_that_is_rendered_may_come_with_functions(service: Service) -> None:
    body = {"prompt": "Is H25 valid?", "tools": ASKED["tools"], "tool_choice": "required"}
    reply = ask(service, body, CALL).json()
    assert [call["function"]["name"] for call in reply["tool_calls"]] == ["look_up"]
    assert ask(service, ASKED).status_code == 200
    assert service.engines.prompts[0] == service.engines.prompts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "text", "names"),
    [(ANSWER, ANSWER, []), (CALL, "", ["look_up"]), ("I look.\n" + TWO, "I look.", ["look_up", "explain"])],
)  # fmt: skip
def test_an_answer_is_text_or_ends_with_calls(
    service: Service, stream: bool, answer: str, text: str, names: list[str]
) -> None:
    answered = ask(service, {**ASKED, "stream": stream}, answer)
    events = events_of(answered) if stream else []
    reply = events[-1][1] if stream else answered.json()
    calls = reply.get("tool_calls", [])
    assert (reply["completion"], reply["finish_reason"]) == (
        text,
        "tool_calls" if names else "stop",
    )
    assert [call["function"]["name"] for call in calls] == names
    assert [call["type"] for call in calls] == ["function"] * len(names)
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"code": "H25"}, {}][: len(names)]
    assert len({call["id"] for call in calls}) == len(names)
    pieces = [piece for kind, piece in events if kind == "token"]
    assert not stream or "".join(piece["text"] for piece in pieces) == text
    put_together: list[str] = []
    for one in (call for piece in pieces for call in piece.get("tool_calls", [])):
        if "id" in one:
            assert (one["id"], one["function"]["name"]) == (
                calls[one["index"]]["id"],
                names[one["index"]],
            )
            put_together.append("")
        put_together[one["index"]] += one["function"]["arguments"]
    assert not stream or put_together == [call["function"]["arguments"] for call in calls]


@pytest.mark.parametrize(
    ("more", "taken", "refused"),
    [
        ({}, ["hi", CALL, "hi " + TWO], [CALL.replace("look_up", "none")]),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["hi", CALL], [TWO]),
        ({"tool_choice": "required"}, [CALL, TWO], ["hi", "hi " + CALL]),
        ({"tool_choice": "required", "allowed_tools": ["explain"]}, [EXPLAIN], [CALL]),
        ({"response_format": {"type": "json_object"}}, [CALL, "{}"], ["hi", "[]"]),
    ],
)  # fmt: skip
def test_the_grammar_follows_the_choice(
    service: Service, more: Any, taken: list[str], refused: list[str]
) -> None:
    assert ask(service, ASKED | more).status_code == 200
    given = grammar(service)
    assert given is not None
    assert [text for text in taken if not accepts(given, text)] == []
    assert [text for text in refused if accepts(given, text)] == []
    assert all(name in rendered(service, 0) for name in ("look_up", "explain"))


def test_with_none_the_model_sees_no_function_and_answers_with_text(service: Service) -> None:
    reply = ask(service, {**ASKED, "tool_choice": "none"}, CALL).json()
    assert grammar(service) is None
    assert "look_up" not in rendered(service, 0)
    assert (reply["completion"], reply["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "text", "names", "reason"),
    [
        ({"max_tokens": len(encoded(CALL)) - 3}, "", ["look_up"], "length"),
        ({"max_tokens": 3, "tool_choice": "required"}, "", [], "length"),
        ({"stop": ["H2"]}, "", ["look_up"], "length"),
        ({"stop": ["\n</tool"]}, "", ["look_up"], "length"),
        ({"stop": ["<tool"], "tool_choice": "required"}, "", [], "length"),
        ({"stop": ["<tool"]}, "", [], "stop"),
    ],
)
def test_a_call_that_is_cut_ends_with_length(
    service: Service, stream: bool, more: Any, text: str, names: list[str], reason: str
) -> None:
    answered = ask(service, {**ASKED, "stream": stream} | more, CALL)
    reply = events_of(answered)[-1][1] if stream else answered.json()
    assert (reply["completion"], reply["finish_reason"]) == (text, reason)
    calls = reply.get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == names
    assert all('{"code": "H25"}'.startswith(call["function"]["arguments"]) for call in calls)


def test_several_answers_have_calls_of_their_own(service: Service) -> None:
    reply = ask(service, {**ASKED, "n": 2, "logprobs": 0}, CALL).json()
    ids = [choice["tool_calls"][0]["id"] for choice in reply["choices"]]
    assert len(set(ids)) == 2
    assert reply["tool_calls"][0]["id"] == ids[0]
    written = "".join(token["token"] for token in reply["choices"][1]["logprobs"])
    assert written == CALL


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Is H25 valid?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"code":"H25"}'},
            }
        ],
    },
    {"role": "tool", "content": "yes", "tool_call_id": "call_1"},
]


def test_calls_and_their_results_are_rendered(service: Service) -> None:
    assert ask(service, {**ASKED, "messages": HISTORY}).status_code == 200
    text = rendered(service, 0)
    assert CALL in text
    assert "<|user|><tool_response>\nyes\n</tool_response><|assistant|>" in text
    # Without functions to call, the conversation goes on all the same.
    assert ask(service, {"messages": HISTORY}).status_code == 200
    assert CALL in rendered(service, 1)
    assert grammar(service) is None


def test_no_text_of_a_function_is_a_special_token(service: Service) -> None:
    mark = "<|assistant|>"
    parameters = {"type": "object", "properties": {mark: {"description": mark}}}
    tool = {"function": {"name": "f", "description": mark, "parameters": parameters}}
    asked = [{"type": "function", **tool}]
    call = {"name": "f", "arguments": json.dumps({mark: mark})}
    called = [{"id": "c", "type": "function", "function": call}]
    result = {**HISTORY[2], "tool_call_id": "c", "content": mark}
    messages = [HISTORY[0], {**HISTORY[1], "tool_calls": called}, result]
    assert ask(service, {"tools": asked, "messages": messages}).status_code == 200
    tokenizer: Any = service.parts.catalogue.default.tokenizer
    prompt = list(service.engines.prompts[0])
    # The template's own two, before the call and at the end.
    assert prompt.count(tokenizer.token_to_id(mark)) == 2
    assert rendered(service, 0).count(mark) == 2 + 6


def test_a_drill_that_empties_an_answer_takes_its_calls(start: Any) -> None:
    service: Service = start(allow_fault_injection=True)
    reply = ask(service, ASKED, CALL, tags={"fault.empty_rate": "1"}).json()
    assert (reply["completion"], reply["finish_reason"]) == ("", "length")
    assert "tool_calls" not in reply


def test_calls_alone_are_no_empty_answer(service: Service) -> None:
    service.engines.answer = encoded(CALL)
    deployment = service.deployment("one")
    assert service.call("POST", path_of(deployment), json=ASKED).status_code == 200
    metrics = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()
    usage = metrics["metrics"]["token_usage"]
    assert (sum(usage["empty_count"]), sum(usage["output"])) == (0, len(encoded(CALL)))


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def turns(*changes: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    messages = [dict(turn) for turn in HISTORY]
    for number, change in changes:
        messages[number] |= change
    return {"messages": messages}


def called(**function: Any) -> tuple[int, dict[str, Any]]:
    call = HISTORY[1]["tool_calls"][0]
    return 1, {"tool_calls": [{**call, "function": {**call["function"], **function}}]}


HERE = "tools[0].function"
UNFOLLOWED = {
    "type": "object",
    "properties": {PLANTED: {"type": "string", "pattern": "(?=a)"}},
    "required": [PLANTED],
}
MANY = {"type": "object", "properties": {str(number): {} for number in range(200)}}
LONG = {"type": "object", "properties": {"a": {"const": "x" * 40_000}}}
REFUSED: list[tuple[Any, int, str]] = [
    ({"tools": [TOOL, TOOL]}, 422, "tools[1]"),
    ({"tools": [tool() | {"type": PLANTED}]}, 422, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, HERE),
    ({"tools": [tool(name=PLANTED)]}, 422, f"{HERE}.name"),
    ({"tools": [tool(name="")]}, 422, f"{HERE}.name"),
    ({"tools": [tool(parameters={"type": "string"})]}, 422, f"{HERE}.parameters.type"),
    ({"tools": [tool(parameters={})]}, 422, f"{HERE}.parameters.type"),
    ({"tools": [tool(parameters={"type": "object", "minProperties": 1})]}, 422, f"{HERE}.parameters.minProperties"),
    ({"tools": [tool(parameters=UNFOLLOWED)]}, 422, f"{HERE}.parameters.properties[0]"),
    ({"tools": [tool(name=f"f{number}") for number in range(129)]}, 422, "tools"),
    ({"tools": [tool(name=f"f{number}", parameters=MANY) for number in range(3)]}, 422, "tools"),
    ({"tools": [tool(name=f"f{number}", parameters=LONG) for number in range(2)]}, 422, "tools"),
    ({"tool_choice": PLANTED}, 422, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, 422, "tool_choice"),
    ({"allowed_tools": ["look_up", "nothing"]}, 422, "allowed_tools[1]"),
    ({"allowed_tools": []}, 422, "allowed_tools"),
    ({"parallel_tool_calls": 1}, 422, "parallel_tool_calls"),
    ({"messages": None, "prompt": "a", "raw": True}, 422, "tools"),
    ({"messages": None, "prompt_token_ids": [5]}, 422, "tools"),
    (turns(called(name=PLANTED)), 422, "messages[1].tool_calls[0].function.name"),
    (turns(called(arguments=PLANTED)), 422, "messages[1].tool_calls[0].function.arguments"),
    (turns(called(arguments="[1]")), 422, "messages[1].tool_calls[0].function.arguments"),
    (turns(called(arguments={"code": PLANTED})), 422, "messages[1].tool_calls[0].function.arguments"),
    (turns((1, {"tool_calls": []})), 422, "messages[1].tool_calls"),
    (turns((1, {"tool_calls": HISTORY[1]["tool_calls"] * 2})), 422, "messages[1].tool_calls[1].id"),
    (turns((1, {"tool_calls": None})), 400, "messages[1].content"),
    (turns((0, {"tool_calls": HISTORY[1]["tool_calls"]})), 422, "messages[0].tool_calls"),
    (turns((0, {"tool_call_id": "call_1"})), 422, "messages[0].tool_call_id"),
    (turns((2, {"tool_call_id": PLANTED})), 422, "messages[2].tool_call_id"),
    (turns((2, {"tool_call_id": ""})), 422, "messages[2].tool_call_id"),
    (turns((2, {"role": "user", "tool_call_id": None})), 422, "messages[1].tool_calls"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared_path(shared: Service) -> str:
    return path_of(shared.deployment("with tools"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sent", "status", "param"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_a_tool_or_call_that_does_not_fit_is_refused_with_its_place(
    shared: Service, shared_path: str, sent: Any, status: int, param: str, stream: bool
) -> None:
    answer = shared.call("POST", shared_path, json={**ASKED, "stream": stream} | sent)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert PLANTED not in answer.text
    assert PLANTED not in "".join(shared.log.texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replicas_fault_of_a_grammar_names_the_functions(service: Service, stream: bool) -> None:
    service.engines.error = {"error": "cannot be compiled for this model", "grammar": True}
    answer = ask(service, {**ASKED, "stream": stream})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["message"] == "tools cannot be compiled for this model"


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_whose_calls_cannot_be_read_refuses_functions_by_name(
    service: Service, stream: bool
) -> None:
    # Played trainings leave a template that writes the first turn's content and nothing else.
    deployment = service.deployment("tuned", model_name=service.model())
    body = {**ASKED, "stream": stream}
    answer = service.call("POST", path_of(deployment), json=body)
    assert answer.status_code == 422, answer.text
    (detail,) = answer.json()["error"]["details"]
    assert (detail["field"], detail["code"]) == ("tools", "unsupported_parameter")
    none = service.call("POST", path_of(deployment), json={**body, "tool_choice": "none"})
    assert none.status_code == 200


def test_a_conversation_that_the_template_refuses_is_the_callers_to_mend(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = service.parts.catalogue.default
    refusing = "{{ raise_exception('no') if messages[-1].role == 'tool' else messages[0].content }}"
    refused = base.text_format.with_template(PromptTemplate(refusing, {}))
    monkeypatch.setitem(vars(base), "text_format", refused)
    body = {"messages": [*HISTORY[:1], {"role": "tool", "content": PLANTED}]}
    answer = ask(service, body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["param"] == "messages"
    assert PLANTED not in answer.text
