"""Several answers to one request, log probabilities, and prompts without a template, through the main API."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.generation.test_generation import RESPONSE, counts, lines, path_of
from tests.service.generation.test_generation_streams import ASK, events_of, open_stream
from tests.support.service.in_process import ANSWER, Service

Start = Callable[..., Service]
PLANTED = "zq planted text 7731"


def test_several_answers_are_one_request_with_one_prompt(service: Service) -> None:
    deployment = service.deployment("one")
    body = {"prompt": "a case", "seed": 5}
    one = service.call("POST", path_of(deployment), json=body).json()
    three = service.call("POST", path_of(deployment), json=body | {"n": 3}).json()
    assert set(one) == RESPONSE
    assert set(three) == RESPONSE | {"choices"}
    assert [choice["completion"] for choice in three["choices"]] == [ANSWER] * 3
    assert three["completion"] == ANSWER
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert sorted(frame["seed"] for frame in service.engines.asked) == [5, 5, 6, 7]
    assert counts(service, deployment) == (2, 0)


def test_the_other_answers_wait_until_the_first_has_read_the_prompt(service: Service) -> None:
    deployment = service.deployment("one")
    service.engines.may_answer.clear()
    asking = service.ask("POST", path_of(deployment), json={"prompt": "a", "n": 3})
    running = asyncio.run_coroutine_threadsafe(asking, service.loop)
    service.until(lambda: len(service.engines.prompts) == 1)
    for _ in range(3):
        service.run(asyncio.sleep(0))
    assert len(service.engines.prompts) == 1
    service.engines.may_answer.set()
    assert len(running.result(120).json()["choices"]) == 3
    assert len(service.engines.prompts) == 3


def test_a_stream_of_several_answers_has_their_pieces_by_index(service: Service) -> None:
    deployment = service.deployment("one")
    answer = service.call("POST", path_of(deployment), json=ASK | {"n": 2, "logprobs": 1})
    events = events_of(answer)
    for index in range(2):
        own = [data for kind, data in events if kind == "token" and data["index"] == index]
        assert "".join(piece["text"] for piece in own) == ANSWER
        tokens = [token for piece in own for token in piece["logprobs"]]
        assert "".join(token["token"] for token in tokens) == ANSWER
        assert tokens == events[-1][1]["choices"][index]["logprobs"]
    assert events[-1][0] == "done"
    single = events_of(service.call("POST", path_of(deployment), json=ASK))
    assert all(set(data) == {"text"} for kind, data in single if kind == "token")


def test_a_reader_who_leaves_ends_all_answers(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 1

    async def leave() -> None:
        async with open_stream(service, path_of(deployment), n=3):
            pass

    asyncio.run(leave())
    service.until(lambda: lines(service, deployment) == [("info", "the caller disconnected")])
    service.until(lambda: not service.engines.replicas[0].running)
    assert counts(service, deployment) == (0, 0)
    service.engines.may_go_on.set()


def test_the_deadline_ends_all_answers(start: Start) -> None:
    service = start(generate_timeout_s=0.5)
    deployment = service.deployment("one")
    service.engines.tokens_before_pause = 1
    answer = service.call("POST", path_of(deployment), json={"prompt": "a", "n": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    service.until(lambda: not service.engines.replicas[0].running)
    assert counts(service, deployment) == (1, 1)
    service.engines.may_go_on.set()


def test_a_fault_of_one_answer_is_that_of_the_request(service: Service) -> None:
    deployment = service.deployment("one")
    service.engines.error = {"error": "too large", "too_large": True}
    answer = service.call("POST", path_of(deployment), json={"prompt": "a", "n": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "max_tokens")
    service.until(lambda: not service.engines.replicas[0].running)


@pytest.mark.parametrize("most", [0, 4])
def test_a_prompt_is_scored_with_or_without_an_answer(service: Service, most: int) -> None:
    deployment = service.deployment("one")
    body = {"prompt": "Grüße", "raw": True, "max_tokens": most, "logprobs": 2}
    reply = service.call("POST", path_of(deployment), json=body | {"prompt_logprobs": True}).json()
    assert set(reply) == RESPONSE | {"logprobs", "prompt_logprobs"}
    scored = reply["prompt_logprobs"]
    assert len(scored) == reply["usage"]["prompt_tokens"]
    assert b"".join(bytes(token["bytes"]) for token in scored).decode() == "Grüße"
    assert (scored[0]["logprob"], scored[0]["top"]) == (None, [])
    assert all(token["logprob"] == -1 and len(token["top"]) == 2 for token in scored[1:])
    assert len(reply["logprobs"]) == reply["usage"]["completion_tokens"] == most
    assert service.engines.prompts[-1] == tuple(token["id"] for token in scored)
    empty = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()["summary"]
    assert empty["error_rate"]["request_count"] == 1


def test_token_ids_and_raw_texts_are_taken_as_they_are(service: Service) -> None:
    deployment = service.deployment("one")
    ids = service.call("POST", path_of(deployment), json={"prompt_token_ids": [3, 40, 1]})
    assert set(ids.json()) == RESPONSE - {"prompt"}
    raw = service.call("POST", path_of(deployment), json={"prompt": "<|user|>", "raw": True})
    assert raw.json()["prompt"] == "<|user|>"
    rendered = service.call("POST", path_of(deployment), json={"prompt": "<|user|>"})
    assert rendered.status_code == 200
    first, second, third = service.engines.prompts
    assert (first, second) == ((3, 40, 1), (3,))
    assert third.count(3) == 1, "in a rendered prompt the text stays a text"
    assert len(third) > 3


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": PLANTED, "prompt_token_ids": [3]}, 422, "prompt_token_ids"),
    ({"messages": [{"role": "user", "content": PLANTED}], "raw": True}, 422, "raw"),
    ({"prompt": PLANTED, "prompt_logprobs": True}, 422, "prompt_logprobs"),
    ({"prompt": PLANTED, "max_tokens": 0}, 422, "max_tokens"),
    ({"prompt": PLANTED, "n": 0}, 422, "n"),
    ({"prompt": PLANTED, "n": 65}, 422, "n"),
    ({"prompt": PLANTED, "logprobs": 21}, 422, "logprobs"),
    ({"prompt": PLANTED, "logprobs": True}, 422, "logprobs"),
    ({"prompt_token_ids": []}, 422, "prompt_token_ids"),
    ({"prompt_token_ids": [3, 3072]}, 422, "prompt_token_ids"),
    ({"prompt_token_ids": [3] * 513}, 422, "prompt_token_ids"),
    ({"prompt": PLANTED * 300, "raw": True}, 422, "prompt"),
    ({}, 400, "prompt"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED)
def test_fields_that_contradict_each_other_are_refused_by_name(
    shared: Service, body: dict[str, Any], status: int, param: str
) -> None:
    made = shared.call("GET", "/v1/deployments").json()["deployments"]
    deployment = made[0]["id"] if made else shared.deployment("one")
    answer = shared.call("POST", path_of(deployment), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert PLANTED not in answer.text


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_tokens": 100, "logprobs": 20, "n": 64}, 64 * 100 * 21),
        ({"max_tokens": 1, "logprobs": 9, "n": 1, "prompt_logprobs": True}, None),
    ],
)
def test_more_log_probabilities_than_one_request_may_ask_for_are_refused_by_name(
    service: Service, fields: dict[str, Any], count: int | None
) -> None:
    made = service.deployment("scored")
    answer = service.call(
        "POST", f"/v1/deployments/{made}/generate", json={"prompt": "a", **fields}
    )
    assert answer.status_code == (200 if count is None else 422), answer.text
    if count is not None:
        assert answer.json()["error"]["param"] == "logprobs"
        assert f"up to {count} log probabilities" in answer.text
    body = {"model": made, "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    body |= {"top_logprobs": 20, "n": 64, "max_tokens": 100}
    refused = service.call("POST", "/openai/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "top_logprobs"
