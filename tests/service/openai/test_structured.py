"""Programs of the `openai` package ask for answers that fit a schema, in chats and in responses."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import CATALOGUE, Service
from tuneship.serving.sampling.grammar import accepts

SECRET = "zq planted text 7731"
MESSAGES: Any = [{"role": "user", "content": "senile cataract"}]
WRITTEN = '{"chapter": "eye", "years": [3]}'


class Chapter(BaseModel):
    """A class that a program hands to `parse`."""

    chapter: str
    years: list[int] | None = None


@pytest.fixture
def structured(answering: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service, whose replicas write JSON."""
    tokenizer: Any = CATALOGUE.default.tokenizer
    tokens = tokenizer.encode(WRITTEN, add_special_tokens=False).ids
    monkeypatch.setattr(answering.engines, "answer", tokens)
    return answering


def newest_grammar(service: Service) -> str:
    return service.engines.asked[-1]["grammar"]


def test_a_chat_is_parsed_into_a_class_of_the_program(
    client: openai.OpenAI, structured: Service
) -> None:
    # The package adds `parsed` to an answer, which its strict validation does not know.
    with blocking(structured, _strict_response_validation=False) as lenient:
        answer = lenient.chat.completions.parse(
            model=ENDPOINT, messages=MESSAGES, n=2, response_format=Chapter
        )
        assert [one.message.parsed for one in answer.choices] == [
            Chapter(chapter="eye", years=[3])
        ] * 2
        with lenient.chat.completions.stream(
            model=ENDPOINT, messages=MESSAGES, response_format=Chapter
        ) as stream:
            ended = stream.get_final_completion()
        assert ended.choices[0].message.parsed == Chapter(chapter="eye", years=[3])
    grammar = newest_grammar(structured)
    assert accepts(grammar, WRITTEN)
    assert not accepts(grammar, '{"chapter": "eye", "years": [3], "more": 1}')
    assert not accepts(grammar, '{"chapter": "eye", "years": ["x"]}')


def test_a_response_is_parsed_into_a_class_of_the_program(
    client: openai.OpenAI, structured: Service
) -> None:
    answer = client.responses.parse(model=ENDPOINT, input="senile cataract", text_format=Chapter)
    assert answer.output_parsed == Chapter(chapter="eye", years=[3])
    assert answer.text is not None
    form: Any = answer.text.format
    assert (form.type, form.name, form.strict) == ("json_schema", "Chapter", True)
    assert form.schema_["properties"]["chapter"] == {"title": "Chapter", "type": "string"}
    assert accepts(newest_grammar(structured), WRITTEN)

    events = list(
        client.responses.create(
            model=ENDPOINT,
            input="senile cataract",
            text={"format": {"type": "json_object"}},
            stream=True,
        )
    )
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == WRITTEN
    assert not accepts(newest_grammar(structured), "[1]")


def test_an_answer_that_reaches_its_limit_is_distinguished(
    client: openai.OpenAI, structured: Service
) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=ENDPOINT, messages=MESSAGES, max_completion_tokens=2, response_format=Chapter
        )
    cut = client.responses.create(
        model=ENDPOINT,
        input="a",
        max_output_tokens=2,
        text={"format": {"type": "json_object"}},
    )
    assert cut.status == "incomplete"


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "text"}])
def test_the_forms_without_a_schema_are_taken(
    client: openai.OpenAI, structured: Service, form: Any
) -> None:
    client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, response_format=form)
    assert (newest_grammar(structured) is None) == (form["type"] == "text")


def test_white_space_is_flexible_where_each_wire_asks_for_it(
    client: openai.OpenAI, structured: Service
) -> None:
    indented = json.dumps(json.loads(WRITTEN), indent=4)
    schema = {"name": "chapter", "schema": Chapter.model_json_schema()}
    deployment = structured.call("GET", "/v1/deployments").json()["deployments"][-1]["id"]
    for more in ({}, {"whitespace_flexible": False}, {"whitespace_flexible": True}):
        main: Any = {"type": "json_schema", "schema": schema["schema"], **more}
        structured.call(
            "POST",
            f"/v1/deployments/{deployment}/generate",
            json={"prompt": "a", "response_format": main},
        )
        grammars = [newest_grammar(structured)]
        chat: Any = {"type": "json_schema", "json_schema": schema, **more}
        client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, response_format=chat)
        grammars.append(newest_grammar(structured))
        form: Any = {"type": "json_schema", **schema, **more}
        client.responses.create(model=ENDPOINT, input="a", text={"format": form})
        grammars.append(newest_grammar(structured))
        assert all(accepts(one, WRITTEN) for one in grammars)
        assert [accepts(one, indented) for one in grammars] == [
            more.get("whitespace_flexible", False)
        ] * 3


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"name": "chapter", "schema": schema, **more}


PARTS: list[tuple[Any, str, str]] = [
    (named({"properties": {SECRET: {"minProperties": 1}}}), "unsupported_value", ".schema.properties[0].minProperties"),
    (named({"type": "object", "x-guidance": {"lenient": SECRET}}), "unsupported_value", ".schema.x-guidance"),
    (named({"items": {"pattern": "(?=a)b", "type": "string"}}), "invalid_value", ".schema.items"),
    (named([SECRET]), "invalid_type", ".schema"),
    (named({}, strict=SECRET), "invalid_type", ".strict"),
    ({"name": "chapter"}, "missing_required_parameter", ".schema"),
    (named({}) | {SECRET: 1}, "unknown_parameter", ""),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("part", "code", "place"), PARTS, ids=map(str, range(len(PARTS))))
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place_on_each_wire(
    client: openai.OpenAI, part: Any, code: str, place: str, stream: bool
) -> None:
    asked = {"model": ENDPOINT, "stream": stream}
    chat_form = {"type": "json_schema", "json_schema": part}
    bodies = {
        ("/chat/completions", "response_format.json_schema"): {"messages": MESSAGES, "response_format": chat_form},
        ("/responses", "text.format"): {"input": "a", "text": {"format": {"type": "json_schema", **part}}},
    }  # fmt: skip
    for (path, param), body in bodies.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.post(path, body=asked | body, cast_to=dict)
        assert (caught.value.code, caught.value.param) == (code, param + place), caught.value.body
        assert SECRET not in json.dumps(caught.value.body)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": SECRET}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "text", "json_schema": named({})}, "response_format.json_schema"),
        (SECRET, "response_format"),
    ],
)
def test_a_form_that_is_none_is_refused(client: openai.OpenAI, form: Any, param: str) -> None:
    body = {"model": ENDPOINT, "messages": MESSAGES, "response_format": form}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=dict)
    assert caught.value.param == param
    assert SECRET not in json.dumps(caught.value.body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replicas_fault_of_a_grammar_names_the_form_on_each_wire(
    client: openai.OpenAI, answering: Service, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    refusal = {"error": "cannot be compiled for this model", "grammar": True}
    monkeypatch.setattr(answering.engines, "error", refusal)
    form = {"type": "json_object"}
    bodies = {
        ("/chat/completions", "response_format"): {"messages": MESSAGES, "response_format": form},
        ("/responses", "text.format"): {"input": "a", "text": {"format": form}},
    }
    for (path, param), body in bodies.items():
        asked = {"model": ENDPOINT, "stream": stream}
        with pytest.raises(openai.BadRequestError) as caught:
            client.post(path, body=asked | body, cast_to=dict)
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)


def test_both_members_of_a_canary_follow_the_schema(structured: Service) -> None:
    shares = {structured.deployment("one"): 50, structured.deployment("two"): 50}
    structured.canary("both", shares)
    count = len(structured.engines.asked)
    with blocking(structured) as client:
        for person in range(12):
            client.chat.completions.create(
                model="both",
                messages=MESSAGES,
                user=str(person),
                response_format={"type": "json_object"},
            )
    asked = structured.engines.asked[count:]
    assert {frame["queue"] for frame in asked} == set(shares)
    assert len({frame["grammar"] for frame in asked}) == 1
    assert asked[0]["grammar"] is not None
