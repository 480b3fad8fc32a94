"""Edge cases of generation: conversations, callers who leave, full queues, deadlines, and who is to blame."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.in_process import ANSWER, Service
from tuneship.service.context.request_slots import InFlightLimits, RequestSlots

Start = Callable[..., Service]
RESPONSE = {"id", "deployment_id", "prompt", "completion", "finish_reason", "usage"}


def path_of(deployment_id: str) -> str:
    return f"/v1/deployments/{deployment_id}/generate"


def counts(service: Service, deployment_id: str) -> tuple[int, int]:
    """The numbers of requests and errors in the metrics."""
    answer = service.call("GET", f"/v1/deployments/{deployment_id}/metrics").json()
    summary = answer["summary"]["error_rate"]
    return summary["request_count"], summary["error_count"]


def lines(service: Service, deployment_id: str) -> list[tuple[str, str]]:
    query = {"filter": "component=generate", "order": "asc"}
    found = service.call("GET", f"/v1/deployments/{deployment_id}/logs", params=query).json()
    return [(one["level"], one["message"]) for one in found["logs"]]


def rendered(service: Service, number: int) -> str:
    tokenizer: Any = service.parts.catalogue.default.tokenizer
    return tokenizer.decode(list(service.engines.prompts[number]), skip_special_tokens=False)


def test_messages_are_rendered_like_the_prompt_they_say_the_same_as(service: Service) -> None:
    deployment = service.deployment("one")
    spoken = service.call("POST", path_of(deployment), json={"prompt": "a case"})
    turns = [{"role": "user", "content": "a case"}]
    answer = service.call("POST", path_of(deployment), json={"messages": turns})
    assert set(spoken.json()) == RESPONSE
    assert set(answer.json()) == RESPONSE - {"prompt"}
    assert answer.json()["completion"] == ANSWER
    assert service.engines.prompts[0] == service.engines.prompts[1]
    whole = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "second"},
    ]
    assert service.call("POST", path_of(deployment), json={"messages": whole}).status_code == 200
    text = rendered(service, 2)
    assert [text.find(one) for one in ("be brief", "first", "yes", "second")] == sorted(
        text.find(one) for one in ("be brief", "first", "yes", "second")
    )
    assert -1 not in [text.find(one) for one in ("be brief", "first", "yes", "second")]


def test_null_and_false_ask_for_nothing(service: Service) -> None:
    deployment = service.deployment("one")
    body = {"prompt": "a", "messages": None, "stream": False, "stop": None, "max_tokens": None}
    assert service.call("POST", path_of(deployment), json=body).status_code == 200


def test_a_caller_who_disconnects_ends_the_run_and_counts_for_nobody(service: Service) -> None:
    deployment = service.deployment("one")
    service.engines.may_answer.clear()

    async def leave() -> None:
        asking = asyncio.create_task(_asgi(service, path_of(deployment)))
        async with asyncio.timeout(120):
            while not service.engines.prompts:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.01)
            await asking

    service.run(leave())
    service.until(lambda: not service.engines.replicas[0].running)
    service.engines.may_answer.set()
    assert counts(service, deployment) == (0, 0)
    assert lines(service, deployment) == [("info", "the caller disconnected")]
    assert service.call("POST", path_of(deployment), json={"prompt": "a"}).status_code == 200
    assert counts(service, deployment) == (1, 0)


async def _asgi(service: Service, path: str) -> None:
    """Send one request whose caller leaves as soon as the model works on it."""
    body = b'{"prompt":"a"}'
    headers = {**service.headers["alice"], "content-type": "application/json"}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("10.9.9.9", 1), "server": ("service.test", 80),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        + [(b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    came = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(came, None)
        while message is None and not service.engines.replicas[0].running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return message or {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert message["type"].startswith("http.response")

    await service.app(scope, receive, send)  # type: ignore[arg-type]


def test_a_closed_connection_is_noticed_by_the_real_http_server(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.may_answer.clear()

    async def impatient() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            asking = asyncio.create_task(
                http.post(
                    service.url + path_of(deployment),
                    json={"prompt": "a"},
                    headers=service.headers["alice"],
                )
            )
            while not service.engines.prompts:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.01)
            asking.cancel()

    asyncio.run(impatient())
    service.until(lambda: not service.engines.replicas[0].running)
    service.until(lambda: lines(service, deployment) == [("info", "the caller disconnected")])
    assert counts(service, deployment) == (0, 0)


def test_a_full_service_refuses_at_once_and_one_client_cannot_fill_it(service: Service) -> None:
    """The running requests wait for this test, so a refusal that did not come at once would never come."""
    deployment = service.deployment("one")
    service.limit(slots=RequestSlots(generations=InFlightLimits(each=2, together=3)))
    theirs = service.deployment("theirs", "bob")
    prompts = service.engines.prompts

    def start(client: str, target: str) -> Future[httpx.Response]:
        """Start a generation that waits; one at a time, because a client's share depends on who came before it."""
        before = len(prompts)
        asking = service.ask("POST", path_of(target), client, json={"prompt": "a"})
        running = asyncio.run_coroutine_threadsafe(asking, service.loop)
        service.until(lambda: len(prompts) > before)
        return running

    service.engines.may_answer.clear()
    running = [start("alice", deployment), start("alice", deployment), start("bob", theirs)]
    full = service.call("POST", path_of(theirs), "bob", json={"prompt": "a"})
    assert (full.status_code, full.json()["error"]["code"]) == (503, "internal_error")
    assert full.headers["x-should-retry"] == "true"
    assert 1 <= int(full.headers["retry-after"]) <= 120
    service.engines.may_answer.set()
    assert [one.result(120).status_code for one in running] == [200] * 3
    service.engines.may_answer.clear()
    running = [start("alice", deployment), start("alice", deployment)]
    mine = service.call("POST", path_of(deployment), json={"prompt": "a"})
    assert (mine.status_code, mine.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    service.engines.may_answer.set()
    assert [one.result(120).status_code for one in running] == [200] * 2


def test_a_generation_beyond_the_deadline_is_an_error_of_the_deployment(start: Start) -> None:
    service = start(generate_timeout_s=0.2)
    deployment = service.deployment("one")
    service.engines.may_answer.clear()
    answer = service.call("POST", path_of(deployment), json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-deployment-id"] == deployment
    assert counts(service, deployment) == (1, 1)
    (line,) = lines(service, deployment)
    assert line == ("error", "500 internal_error: the generation took too long")
    service.until(lambda: not service.engines.replicas[0].running)
    service.engines.may_answer.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_delete_tells_its_running_generations_that_it_was_one(
    service: Service, stream: bool
) -> None:
    deployment = service.deployment("one")
    service.engines.may_answer.clear()
    body = {"prompt": "a", "stream": stream}
    running = asyncio.run_coroutine_threadsafe(
        service.ask("POST", path_of(deployment), json=body), service.loop
    )
    service.until(lambda: len(service.engines.prompts) == 1)
    path = f"/v1/deployments/{deployment}"
    assert service.call("DELETE", f"{path}?force=true").status_code == 200
    error = running.result(120).json()["error"]
    assert (running.result().status_code, error["code"]) == (409, "deployment_error")
    assert error["message"] == "the deployment is being deleted"
    deletions = [line for line in lines(service, deployment) if "deleted" in line[1]]
    assert deletions == [("warning", "409 deployment_error: the deployment is being deleted")]
    service.engines.may_answer.set()


def test_metrics_and_log_blame_the_same_party(service: Service) -> None:
    deployment = service.deployment("one")
    service.call("POST", path_of(deployment), json={"prompt": "word " * 5000})
    service.call("POST", path_of(deployment), json={"prompt": "a", "max_tokens": 10_000})
    assert counts(service, deployment) == (0, 0)
    service.rest()
    service.call("DELETE", f"/v1/deployments/{deployment}")
    refused = service.call("POST", path_of(deployment), json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "deployment_error")
    assert counts(service, deployment) == (1, 1)
    assert Counter(level for level, _ in lines(service, deployment)) == {"info": 2, "warning": 1}


def test_one_that_is_still_being_created_says_when_to_come_back(service: Service) -> None:
    service.rest()
    body = {"model_name": "tuneship-tiny", "deployment_name": "one"}
    deployment = service.call("POST", "/v1/deployments", json=body).json()["id"]
    answer = service.call("POST", path_of(deployment), json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deployment_error")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_never_fits_into_memory_is_refused_with_the_two_counts(
    service: Service, stream: bool
) -> None:
    deployment = service.deployment("one")
    counted = "900 tokens of prompt and answer, the memory for them holds 800"
    service.engines.error = {"error": counted, "too_large": True}
    answer = service.call("POST", path_of(deployment), json={"prompt": "a", "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "validation_error")
    assert (error["param"], counted in error["message"]) == ("max_tokens", True)
    assert counts(service, deployment) == (0, 0)
    service.engines.error = {"error": "the model's output is not finite"}
    answer = service.call("POST", path_of(deployment), json={"prompt": "a", "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert counts(service, deployment) == (1, 1)


def test_each_deployment_has_a_queue_of_its_own(service: Service) -> None:
    deployments = [service.deployment("one"), service.deployment("two")]
    for one in deployments:
        assert service.call("POST", path_of(one), json={"prompt": "a"}).status_code == 200
    assert [frame["queue"] for frame in service.engines.asked] == deployments


SETTINGS = {"max_tokens": 9, "temperature": 0.25, "top_p": 0.5, "seed": 11}


@pytest.mark.parametrize("stream", [False, True])
def test_the_settings_of_a_request_reach_the_model(service: Service, stream: bool) -> None:
    defaults = {"default_temperature": 0.5, "default_top_p": 0.75, "max_output_tokens": 99}
    deployment = service.deployment("one", model_config=defaults)
    for body in (SETTINGS, {}):
        answer = service.call(
            "POST", path_of(deployment), json={"prompt": "a", "stream": stream, **body}
        )
        assert answer.status_code == 200
    asked = [{name: frame[name] for name in SETTINGS} for frame in service.engines.asked]
    own = {"max_tokens": 99, "temperature": 0.5, "top_p": 0.75, "seed": None}
    assert asked == [SETTINGS, own]


def test_generations_read_the_database_again_only_after_a_write(service: Service) -> None:
    deployment = service.deployment("one")
    endpoint = service.canary("shop", {deployment: 100})
    service.rest()  # the supervisor could write at any time
    paths = (path_of(deployment), f"/v1/endpoints/{endpoint}/generate")
    begun: list[object] = []

    def read_by_a_round() -> int:
        before = len(begun)
        for path in paths:
            assert service.call("POST", path, json={"prompt": "a"}).status_code == 200
        return len(begun) - before

    note = begun.append
    sa.event.listen(service.database.engine, "begin", note)
    try:
        assert read_by_a_round() > 0
        assert read_by_a_round() == 0
        changed = service.call("PATCH", f"/v1/deployments/{deployment}", json={"tags": {"a": "b"}})
        assert changed.status_code == 200
        assert read_by_a_round() > 0
        deletion = service.call("DELETE", f"/v1/canary-endpoints/{endpoint}")
        assert deletion.status_code == 200
        assert service.call("POST", paths[1], json={"prompt": "a"}).status_code == 404
    finally:
        sa.event.remove(service.database.engine, "begin", note)


@pytest.mark.parametrize("size", [3_000, 9_000, 900_000])
def test_a_prompt_that_the_context_does_not_hold_is_refused_however_long_it_is(
    service: Service, size: int
) -> None:
    """The longest prompts are refused without counting their tokens, which would take a second."""
    deployment = service.deployment("one")
    for field, value in (
        ("prompt", "rib 1 " * (size // 6)),
        ("messages", [{"role": "user", "content": "rib 1 " * (size // 6)}]),
    ):
        refused = service.call("POST", path_of(deployment), json={field: value})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (422, field)
        assert error["details"][0]["code"] == "out_of_range"
        assert "512" in error["message"]
    assert (
        service.call("POST", path_of(deployment), json={"prompt": "rib " * 30}).status_code == 200
    )
