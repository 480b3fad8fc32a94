"""The service accepts what OpenAI accepts, and each of its answers as a turn of the next request."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.service.generation.test_structured import encoded
from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import ANSWER, Service

ASKED: Any = {"role": "user", "content": "Is H25 valid?"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}
FLAT: Any = {"type": "function", "strict": True, **TOOL["function"]}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"code": "H25"}}\n</tool_call>'
# What a model writes: a text, nothing, a call, and a call behind a text.
WRITTEN = {"text": ANSWER, "nothing": "", "call": CALL, "both": "I look.\n" + CALL}


class Verdict(BaseModel):
    """A class that a program hands to `parse`."""

    is_valid: bool


@pytest.fixture
def writes(answering: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that says what the replicas write."""

    def let(text: str) -> None:
        monkeypatch.setattr(answering.engines, "answer", encoded(text))

    return let


def newest(service: Service) -> dict[str, Any]:
    """The newest request to a replica, with its prompt as text."""
    tokenizer: Any = service.parts.catalogue.default.tokenizer
    frame = service.engines.asked[-1]
    return {**frame, "prompt": tokenizer.decode(frame["tokens"], skip_special_tokens=False)}


FIELDS: list[dict[str, Any]] = [
    {"temperature": None, "top_p": None, "stop": None, "seed": None, "stream_options": None, "n": None},
    {"stop": []},
    {"stop": ["a", "b", "c", "d"]},
    {"n": 1, "logprobs": False, "user": "", "safety_identifier": "", "prompt_cache_key": ""},
    {"logprobs": None, "top_logprobs": None, "tools": None, "tool_choice": None, "functions": None},
    {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]},
    {"response_format": {"type": "text"}, "max_completion_tokens": 9, "max_tokens": None},
    {"parallel_tool_calls": False, "tool_choice": "auto"},
    {"parallel_tool_calls": True, "tool_choice": "none", "tools": [TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "look_up"}}, "tools": [TOOL]},
    {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "audio": None},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=map(str, range(len(FIELDS))))
def test_a_chat_takes_the_fields_that_openai_takes(client: openai.OpenAI, fields: Any) -> None:
    body = {"model": ENDPOINT, "messages": [ASKED], **fields}
    assert client.post("/chat/completions", body=body, cast_to=object)


TURNS: dict[str, tuple[list[Any], str]] = {
    "a name": ([{**ASKED, "name": "ada"}], "Is H25 valid?"),
    "no text": ([{"role": "user", "content": ""}], "<|user|><|assistant|>"),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": one} for one in ("a", "", "b")]}], "<|user|>ab<"),
    "a late system turn": ([ASKED, {"role": "system", "content": "late"}], "<|system|>late"),
    "a late developer turn": ([ASKED, {"role": "developer", "content": "late"}], "<|system|>late"),
    "a system turn alone": ([{"role": "system", "content": "alone"}], "<|system|>alone<|assistant|>"),
    "null": ([ASKED, {"role": "assistant", "content": None}, ASKED], "<|assistant|><|end|>"),
    "a refusal": ([ASKED, {"role": "assistant", "content": None, "refusal": "I do not."}, ASKED], "I do not.<|end|>"),
    "a refusal as a part": (
        [ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I do not."}]}, ASKED],
        "I do not.<|end|>",
    ),
    "a call without arguments": (
        [
            ASKED,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "yes"},
        ],
        '{"name": "f", "arguments": {}}',
    ),
    "an answer of another service": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": "yes",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "name": "bot",
                "reasoning_content": "long",
            },
            ASKED,
        ],
        "<|assistant|>yes<|end|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TURNS)
def test_a_chat_takes_the_turns_that_openai_takes(
    client: openai.OpenAI, answering: Service, kind: str
) -> None:
    turns, seen = TURNS[kind]
    client.chat.completions.create(model=ENDPOINT, messages=turns)
    prompt = newest(answering)["prompt"]
    assert seen in prompt
    assert "long" not in prompt


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_of_a_chat_is_a_turn_of_the_next(
    answering: Service, writes: Any, kind: str, stream: bool
) -> None:
    writes(WRITTEN[kind])
    # The package adds `parsed` to an answer, which its strict validation does not know.
    with blocking(answering, _strict_response_validation=False) as client:
        asked: dict[str, Any] = {"model": ENDPOINT, "messages": [ASKED], "tools": [TOOL]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "yes"}
            for call in message.tool_calls or ()
        ]
        for turn in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            history: Any = [ASKED, turn, *results, ASKED]
            client.chat.completions.create(model=ENDPOINT, messages=history, tools=[TOOL])
            assert f"<|assistant|>{WRITTEN[kind]}<|end|>" in newest(answering)["prompt"]


# The package's own classes of parsed answers warn when they are written.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_parsed_answer_and_pieces_put_together_are_turns_of_the_next_chat(
    answering: Service, writes: Any
) -> None:
    with blocking(answering, _strict_response_validation=False) as client:
        writes('{"is_valid": true}')
        asked: dict[str, Any] = {"model": ENDPOINT, "messages": [ASKED]}
        parsed = client.chat.completions.parse(**asked, response_format=Verdict).choices[0].message
        for turn in (parsed, parsed.model_dump(warnings=False)):
            history: Any = [ASKED, turn, ASKED]
            client.chat.completions.create(model=ENDPOINT, messages=history)

        writes(CALL)
        pieces = [
            piece.model_dump(exclude_none=True)
            for chunk in client.chat.completions.create(**asked, tools=[TOOL], stream=True)
            for piece in chunk.choices[0].delta.tool_calls or ()
        ]
        call = pieces[0]
        for piece in pieces[1:]:
            call["function"]["arguments"] += piece["function"]["arguments"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "yes"}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        history = [ASKED, said, result]
        client.chat.completions.create(model=ENDPOINT, messages=history, tools=[TOOL])
        assert f"<|assistant|>{CALL}<|end|>" in newest(answering)["prompt"]


def test_a_parsed_response_is_an_item_of_the_next_one(answering: Service, writes: Any) -> None:
    writes('{"is_valid": true}')
    with blocking(answering, _strict_response_validation=False) as client:
        first = client.responses.parse(model=ENDPOINT, input=[ASKED], text_format=Verdict)
        for items in (first.output, [item.model_dump() for item in first.output]):
            history: Any = [ASKED, *items, ASKED]
            client.responses.create(model=ENDPOINT, input=history)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("stream", [False, True])
def test_every_response_is_an_item_of_the_next_one(
    client: openai.OpenAI, answering: Service, writes: Any, kind: str, stream: bool
) -> None:
    writes(WRITTEN[kind])
    asked: dict[str, Any] = {"model": ENDPOINT, "input": [ASKED], "tools": [FLAT]}
    if stream:
        with client.responses.stream(**asked) as events:
            output = [*events.get_final_response().output]
    else:
        output = client.responses.create(**asked).output
    calls = [item for item in output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "yes"} for item in calls
    ]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    for items in (output, [item.model_dump() for item in output]):
        history: Any = [ASKED, reasoning, *items, *results, ASKED]
        client.responses.create(model=ENDPOINT, input=history, tools=[FLAT])
        assert f"<|assistant|>{WRITTEN[kind]}<|end|>" in newest(answering)["prompt"]


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "", "user": "", "safety_identifier": "", "metadata": {}, "input": ""},
        {"reasoning": {"effort": None, "summary": None}, "text": {}, "top_p": 0, "store": False},
        {"input": [{"role": "assistant", "content": ""}, {"role": "user", "content": ""}]},
        {"input": [{"role": "user", "content": "a"}, {"role": "developer", "content": "late"}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}]}]},
    ],
    ids=map(str, range(5)),
)
def test_a_response_takes_the_fields_that_openai_takes(client: openai.OpenAI, fields: Any) -> None:
    body = {"model": ENDPOINT, "input": "a", **fields}
    assert client.post("/responses", body=body, cast_to=object)


SEEDS = {-1: 2**63 - 1, 0: 0, 7: 7, 2**63 - 1: 2**63 - 1, 2**64 + 5: 5, -(2**70): 0}


@pytest.mark.parametrize("seed", SEEDS)
def test_any_integer_is_a_seed_on_both_apis(
    client: openai.OpenAI, answering: Service, seed: int
) -> None:
    client.chat.completions.create(model=ENDPOINT, messages=[ASKED], seed=seed)
    assert newest(answering)["seed"] == SEEDS[seed]
    client.completions.create(model=ENDPOINT, prompt="a", seed=seed)
    assert newest(answering)["seed"] == SEEDS[seed]
    deployment = answering.call("GET", "/v1/deployments").json()["deployments"][-1]["id"]
    path, body = f"/v1/deployments/{deployment}/generate", {"prompt": "a", "seed": seed}
    assert answering.call("POST", path, json=body).status_code == 200
    assert newest(answering)["seed"] == SEEDS[seed]


def test_a_top_p_of_nothing_is_greedy_on_both_apis(
    client: openai.OpenAI, answering: Service
) -> None:
    asked: dict[str, Any] = {"model": ENDPOINT, "top_p": 0, "temperature": 1.5}
    client.chat.completions.create(messages=[ASKED], **asked)
    assert newest(answering)["temperature"] == 0
    client.completions.create(prompt="a", **asked)
    assert newest(answering)["temperature"] == 0
    assert client.responses.create(input="a", **asked).top_p == 0
    assert newest(answering)["temperature"] == 0
    deployment = answering.call("GET", "/v1/deployments").json()["deployments"][-1]["id"]
    path, body = f"/v1/deployments/{deployment}/generate", {"prompt": "a", "top_p": 0}
    assert answering.call("POST", path, json=body).status_code == 200
    asked_last = newest(answering)
    assert asked_last["temperature"] == 0
    assert asked_last["top_p"] > 0


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_other_pieces_of_a_stream_with_usage_have_none(
    answering: Service, client: openai.OpenAI, path: str
) -> None:
    body = {"model": ENDPOINT, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [ASKED]} if path.startswith("chat") else {"prompt": "a"}
    raw = client.post(f"/{path}", body=body, cast_to=str)
    pieces = [
        json.loads(line.removeprefix("data: "))
        for line in raw.split("\n")
        if line.startswith("data: {")
    ]
    assert [piece["usage"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["total_tokens"] > 0


def test_texts_that_are_too_long_are_refused_in_the_words_for_prompts(
    client: openai.OpenAI,
) -> None:
    long = "cataract " * 2000
    asks: list[Any] = [
        lambda: client.completions.create(model=ENDPOINT, prompt=long),
        lambda: client.completions.create(model=ENDPOINT, prompt=[3] * 600),
        lambda: client.embeddings.create(model=ENDPOINT, input=long),
    ]
    for ask in asks:
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 512 tokens, however" in caught.value.message
        assert "in your prompt" in caught.value.message
        assert "messages" not in caught.value.message
