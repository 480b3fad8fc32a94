"""Answers that must fit a schema, through the main API: what a replica is asked, how answers end, what is refused."""

import json
from typing import Any

import pytest

from tests.service.generation.test_generation import counts, path_of
from tests.service.generation.test_generation_streams import events_of
from tests.support.service.in_process import CATALOGUE, Service
from tuneship.serving.sampling.grammar import accepts

PLANTED = "zq planted text 7731"
INTEGER = {"type": "json_schema", "schema": {"type": "integer"}}


def encoded(text: str) -> list[int]:
    tokenizer: Any = CATALOGUE.default.tokenizer
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_a_replica_gets_the_grammar_of_the_schema(service: Service) -> None:
    path = path_of(service.deployment("one"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {"prompt": "a", "n": 2, "response_format": {"type": "json_schema", "schema": schema}}
    assert service.call("POST", path, json=body).status_code == 200
    grammars = [frame["grammar"] for frame in service.engines.asked]
    assert len(grammars) == 2
    assert all(accepts(grammar, '{"a": 5}') for grammar in grammars)
    assert not any(accepts(grammar, '{"b": 5}') for grammar in grammars)


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_free_text_has_no_grammar(service: Service, form: Any) -> None:
    body = {"prompt": "a", "response_format": form}
    assert service.call("POST", path_of(service.deployment("one")), json=body).status_code == 200
    assert service.engines.asked[-1]["grammar"] is None


def test_a_json_object_is_any_object_and_nothing_else(service: Service) -> None:
    body = {"prompt": "a", "response_format": {"type": "json_object"}}
    assert service.call("POST", path_of(service.deployment("one")), json=body).status_code == 200
    grammar = service.engines.asked[-1]["grammar"]
    assert accepts(grammar, '{"a": [1, {"b": null}]}')
    assert not accepts(grammar, "[1]")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop", "text", "reason"),
    [
        ("12 and", " and", "12", "stop"),
        ("-12", "1", "-", "length"),
        ("12", "and", "12", "stop"),
    ],
)
def test_a_stop_text_within_an_answer_cuts_it_like_its_limit(
    service: Service, stream: bool, answer: str, stop: str, text: str, reason: str
) -> None:
    service.engines.answer = encoded(answer)
    body = {"prompt": "a", "stop": [stop], "stream": stream, "response_format": INTEGER}
    answered = service.call("POST", path_of(service.deployment("one")), json=body)
    reply = events_of(answered)[-1][1] if stream else answered.json()
    assert (reply["completion"], reply["finish_reason"]) == (text, reason)


def test_a_drill_that_cuts_an_answer_ends_it_as_its_limit_would(start: Any) -> None:
    service: Service = start(allow_fault_injection=True)
    service.engines.answer = encoded("1 2 3 4 5 6 7 8 9 10")
    deployment = service.deployment("short", tags={"fault.short": "1"})
    body = {"prompt": "a", "response_format": INTEGER}
    reply = service.call("POST", path_of(deployment), json=body).json()
    assert reply["finish_reason"] == "length"


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema, **more}


def second(part: Any) -> dict[str, Any]:
    return form({"type": "object", "properties": {"a": {}, PLANTED: part}})


HERE = "response_format.schema"
REFUSED: list[tuple[Any, int, str]] = [
    (form(None), 400, HERE),
    ({"type": "json_object", "schema": {}}, 422, HERE),
    ({"type": PLANTED}, 422, "response_format.type"),
    ({}, 400, "response_format.type"),
    (form([]), 422, HERE),
    (form({}, strict=True), 400, "response_format.strict"),
    (second({"minProperties": 1}), 422, f"{HERE}.properties[1].minProperties"),
    (second({PLANTED: 1}), 422, f"{HERE}.properties[1]"),
    (second({"type": "string", "pattern": "(?=a)b"}), 422, f"{HERE}.properties[1]"),
    (second({"type": "number", "minimum": 1e300}), 422, f"{HERE}.properties[1]"),
    (form({"type": "integer", "minimum": 3, "maximum": 2}), 422, HERE),
    (form({"oneOf": [{"type": "string"}, {"type": "string"}]}), 422, HERE),
    (form({"const": 10**400}), 422, HERE),
    (form({"$ref": f"#/$defs/{PLANTED}"}), 422, f"{HERE}.$ref"),
    (form({"required": [PLANTED], "additionalProperties": False, "type": "object"}), 422, HERE),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sent", "status", "param"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(
    shared: Service, shared_path: str, sent: Any, status: int, param: str, stream: bool
) -> None:
    body = {"prompt": "a", "stream": stream, "response_format": sent}
    answer = shared.call("POST", shared_path, json=body)
    assert answer.status_code == status, answer.text
    assert (answer.json()["error"]["param"] or "") == param, answer.text
    assert PLANTED not in answer.text
    assert PLANTED not in "".join(shared.log.texts)


@pytest.fixture(scope="module")
def shared_path(shared: Service) -> str:
    return path_of(shared.deployment("structured"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_replicas_fault_of_a_grammar_is_the_callers_to_mend(
    service: Service, stream: bool
) -> None:
    deployment = service.deployment("one")
    service.engines.error = {"error": "cannot be compiled for this model", "grammar": True}
    body = {"prompt": "a", "stream": stream, "response_format": INTEGER}
    answer = service.call("POST", path_of(deployment), json=body)
    assert answer.status_code == 422, answer.text
    error = json.loads(answer.text)["error"]
    assert error["param"] == "response_format"
    assert error["message"] == "response_format cannot be compiled for this model"
    assert counts(service, deployment) == (0, 0), "a refusal is no request that the gates count"
