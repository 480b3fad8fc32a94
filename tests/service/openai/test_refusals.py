"""Refusals in OpenAI's form: the status, type and code that its clients look for, and nothing of what was sent."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import bare_headers, blocking
from tests.support.service.in_process import Service

SECRET = "zq planted text 7731"
MESSAGES = [{"role": "user", "content": SECRET}]
CHAT = {"model": ENDPOINT, "messages": MESSAGES}
TEXT = {"model": ENDPOINT, "prompt": SECRET}

REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("chat/completions", CHAT | {"n": 65}, "invalid_value", "n"),
    ("chat/completions", CHAT | {"n": True}, "invalid_type", "n"),
    ("chat/completions", CHAT | {"logprobs": 2}, "invalid_type", "logprobs"),
    ("chat/completions", CHAT | {"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ("chat/completions", CHAT | {"logit_bias": {"5": 1}}, "unsupported_value", "logit_bias"),
    ("chat/completions", CHAT | {"tools": [{"name": SECRET}]}, "unknown_parameter", "tools[0].name"),
    ("chat/completions", CHAT | {"functions": [SECRET]}, "unsupported_parameter", "functions"),
    ("chat/completions", CHAT | {"top_k": 5}, "unknown_parameter", "top_k"),
    ("chat/completions", CHAT | {SECRET: 5}, "unknown_parameter", None),
    ("chat/completions", CHAT | {"temperature": 9.5}, "invalid_value", "temperature"),
    ("chat/completions", CHAT | {"temperature": SECRET}, "invalid_type", "temperature"),
    ("chat/completions", {"model": ENDPOINT}, "missing_required_parameter", "messages"),
    ("chat/completions", {"messages": MESSAGES}, "missing_required_parameter", "model"),
    ("chat/completions", CHAT | {"messages": []}, "invalid_value", "messages"),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "assistant", "content": SECRET}]},
        "invalid_value",
        "messages",
    ),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "a", "audio": {"id": SECRET}}]},
        "unsupported_parameter",
        "messages[0].audio",
    ),
    ("chat/completions", CHAT | {"max_completion_tokens": 10**6}, "invalid_value", "max_completion_tokens"),
    ("chat/completions", CHAT | {"max_tokens": 10**6}, "invalid_value", "max_tokens"),
    ("completions", TEXT | {"prompt": []}, "invalid_type", "prompt"),
    ("completions", TEXT | {"prompt": [SECRET, 3]}, "invalid_type", "prompt"),
    ("completions", TEXT | {"prompt": [SECRET, ""]}, "invalid_type", "prompt"),
    ("completions", TEXT | {"prompt": [[3, True]]}, "invalid_type", "prompt"),
    ("completions", TEXT | {"prompt": [3, -1]}, "invalid_type", "prompt"),
    ("completions", TEXT | {"prompt": [3, 3072]}, "invalid_value", "prompt"),
    ("completions", TEXT | {"prompt": [SECRET] * 33, "n": 2}, "invalid_value", "prompt"),
    ("completions", TEXT | {"prompt": [3] * 513}, "context_length_exceeded", "prompt"),
    ("completions", TEXT | {"logprobs": 6}, "invalid_value", "logprobs"),
    ("completions", TEXT | {"max_tokens": 0}, "invalid_value", "max_tokens"),
    ("completions", TEXT | {"echo": True, "stream": True}, "invalid_value", "echo"),
    ("completions", TEXT | {"best_of": 2}, "unsupported_value", "best_of"),
    ("completions", TEXT | {"suffix": SECRET}, "unsupported_parameter", "suffix"),
]  # fmt: skip


def post(service: Service, path: str, body: Any, **options: Any) -> httpx.Response:
    url = f"{service.url}/openai/v1/{path}"
    headers = options.pop("headers", bare_headers(service))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(url, content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED)
def test_a_field_is_refused_by_its_name_and_never_by_its_value(
    answering: Service, path: str, body: dict[str, Any], code: str, param: str | None
) -> None:
    answer = post(answering, path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert (error["code"], error["type"]) == (code, "invalid_request_error"), answer.text
    assert error["param"] == param, answer.text
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert SECRET not in answer.text
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "a", "model": "b"}', b"\xff", b"null"])
def test_a_body_that_cannot_be_read_is_refused(answering: Service, body: bytes) -> None:
    answer = post(answering, "chat/completions", body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_conversation_that_is_too_long_has_the_code_and_the_sentence_that_programs_look_for(
    client: openai.OpenAI,
) -> None:
    long = [{"role": "user", "content": "cataract " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=ENDPOINT, messages=long)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens. However" in caught.value.message


def test_the_clients_error_classes_follow(answering: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=SECRET, messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert SECRET not in str(caught.value.body)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"
    with (
        blocking(answering, api_key="sk-wrong") as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()
    with pytest.raises(openai.NotFoundError) as caught:
        client.moderations.create(input=SECRET)
    assert caught.value.code == "unknown_url"


def test_a_missing_scope_is_refused_and_recorded(answering: Service) -> None:
    key = answering.key_headers("alice", frozenset({"models:read"}))["Authorization"]
    answer = post(answering, "chat/completions", CHAT, headers={"Authorization": key})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "missing_scope"
    records = answering.call("GET", "/v1/audit").json()
    assert any("openai_create_chat_completion" in json.dumps(one) for one in records["entries"])


def test_another_tenants_names_do_not_exist(answering: Service) -> None:
    with blocking(answering, "bob") as bob:
        with pytest.raises(openai.NotFoundError):
            bob.chat.completions.create(model=ENDPOINT, messages=MESSAGES)
        assert ENDPOINT not in {model.id for model in bob.models.list()}
        deployment = answering.call("GET", "/v1/deployments").json()["deployments"][0]["id"]
        with pytest.raises(openai.NotFoundError):
            bob.chat.completions.create(model=deployment, messages=MESSAGES)


def test_a_fault_of_the_deployment_is_a_server_error(
    answering: Service, client: openai.OpenAI
) -> None:
    made = answering.deployment("faulty", tags={"fault.error_rate": "1"})
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=made, messages=MESSAGES)
    assert caught.value.type == "server_error"


def test_no_text_of_a_request_is_in_the_log(answering: Service) -> None:
    assert not [line for line in answering.log.texts if SECRET in line]
