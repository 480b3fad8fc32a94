"""Programs of the `openai` package chat with endpoints, deployments and models, whole and streamed."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import asynchronous, bare_headers, blocking, key_of
from tests.support.service.in_process import ANSWER, Service

MESSAGES = [{"role": "user", "content": "senile cataract"}]


def test_an_unchanged_program_chats_with_an_endpoint_of_the_models_name(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tuneship-tiny"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


@pytest.mark.parametrize("model", ["tuneship-tiny", "dep", "ep"])
def test_ids_and_models_answer_too(client: openai.OpenAI, answering: Service, model: str) -> None:
    kinds = {"dep": ("deployments", "deployments"), "ep": ("endpoints", "endpoints")}
    if model in kinds:
        path, name = kinds[model]
        # The oldest: other tests make deployments with faults.
        model = answering.call("GET", f"/v1/{path}").json()[name][-1]["id"]
    answer = client.chat.completions.create(model=model, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER


def test_system_and_developer_turns_and_text_parts_are_read(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=ENDPOINT,
        messages=[
            {"role": "system", "content": "Name the chapter."},
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            *MESSAGES,
        ],
        temperature=0,
        top_p=1,
        seed=7,
        stop=["\n"],
        max_completion_tokens=32,
        n=1,
        logprobs=False,
        presence_penalty=0,
        response_format={"type": "text"},
        store=False,
        metadata={"case": "1"},
        user="ada",
    )
    assert answer.choices[0].message.content == ANSWER


def test_a_stream_has_the_whole_text_and_the_usage_when_it_is_asked_for(
    client: openai.OpenAI,
) -> None:
    stream = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == ANSWER
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0

    without = list(client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in without)


def test_a_stream_is_data_lines_only(answering: Service) -> None:
    body = {"model": ENDPOINT, "messages": MESSAGES, "stream": True}
    headers = {**bare_headers(answering), "Accept": "application/x-ndjson"}
    answer = httpx.post(
        f"{answering.url}/openai/v1/chat/completions", json=body, headers=headers, timeout=60
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("finish_reason" in piece["choices"][0] for piece in pieces)
    assert not any("usage" in piece for piece in pieces)


def test_the_asynchronous_client_chats_and_streams(answering: Service) -> None:
    async def talk() -> tuple[str | None, str]:
        async with asynchronous(answering) as client:
            whole = await client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)
            stream = await client.chat.completions.create(
                model=ENDPOINT, messages=MESSAGES, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(talk()) == (ANSWER, ANSWER)


def test_completions_answer_whole_and_streamed(client: openai.OpenAI, answering: Service) -> None:
    whole = client.completions.create(model=ENDPOINT, prompt="senile cataract", max_tokens=32)
    assert whole.choices[0].text == ANSWER
    assert whole.id.startswith("cmpl-")
    assert whole.usage is not None
    # The package's type of a piece knows no null as `finish_reason`, which OpenAI sends.
    with blocking(answering, _strict_response_validation=False) as lenient:
        stream = lenient.completions.create(
            model=ENDPOINT, prompt=["senile cataract"], max_tokens=32, stream=True
        )
        pieces = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_models_lists_bases_and_endpoints(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {ENDPOINT, "tuneship-tiny"} <= set(listed)
    assert listed["tuneship-tiny"].owned_by == "tuneship"
    assert client.models.retrieve(ENDPOINT) == listed[ENDPOINT]
    assert client.models.retrieve("tuneship-tiny").object == "model"


def test_one_person_stays_on_one_arm_of_a_canary(client: openai.OpenAI, answering: Service) -> None:
    first, second = answering.deployment("arm one"), answering.deployment("arm two")
    answering.canary("split", {first: 50, second: 50})

    def arm_of(person: str) -> str:
        raw = client.chat.completions.with_raw_response.create(
            model="split", messages=MESSAGES, safety_identifier=person
        )
        return raw.headers["x-deployment-id"]

    arms = {person: {arm_of(person) for _ in range(3)} for person in map(str, range(12))}
    assert all(len(found) == 1 for found in arms.values())
    assert {*set().union(*arms.values())} == {first, second}


def test_the_key_alone_says_who_asks_and_other_names_are_refused(answering: Service) -> None:
    url = f"{answering.url}/openai/v1/models"
    key = key_of(answering)
    good = [
        {"Authorization": f"Bearer {key}"},
        {"api-key": key},
        {"Authorization": f"Bearer {key}", "X-Client-ID": "alice", "OpenAI-Project": "alice"},
    ]
    for headers in good:
        assert httpx.get(url, headers=headers).status_code == 200, headers
    bad = [
        ({}, "invalid_api_key"),
        ({"Authorization": "Bearer sk-planted-text"}, "invalid_api_key"),
        ({"Authorization": f"Bearer {key}", "X-Client-ID": "bob"}, "invalid_api_key"),
        ({"api-key": key, "OpenAI-Organization": "org-planted"}, "mismatched_organization"),
        ({"api-key": key, "OpenAI-Project": "proj-planted"}, "mismatched_project"),
    ]
    for headers, code in bad:
        answer = httpx.get(url, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.json()["error"]["code"] == code
        assert "planted" not in answer.text


def test_the_main_api_still_requires_the_client_id(answering: Service) -> None:
    answer = httpx.get(f"{answering.url}/v1/models", headers=bare_headers(answering))
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "authentication_error"


def test_answers_have_the_headers_that_clients_read(answering: Service) -> None:
    answer = httpx.get(f"{answering.url}/openai/v1/models", headers=bare_headers(answering))
    assert answer.headers["openai-organization"] == "alice"
    assert answer.headers["x-request-id"].startswith("req_")
    assert int(answer.headers["x-ratelimit-limit-requests"]) > 0
    assert float(answer.headers["openai-processing-ms"]) >= 0
