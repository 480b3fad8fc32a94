"""`stream: true` sends pieces of text and then the whole reply; it may be refused, fail midway, or lose its reader."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.service.generation.test_generation import counts, lines, path_of
from tests.service.jobs.test_streams import Reader
from tests.support.service.in_process import ANSWER, Service
from tuneship.contract.generation import Generate, GeneratedText
from tuneship.service.context.request_slots import InFlightLimits, RequestSlots

Start = Callable[..., Service]
ASK = {"prompt": "a case", "stream": True}


def events_of(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return events_read(Reader(answer, answer.text))


def events_read(reader: Reader) -> list[tuple[str, dict[str, Any]]]:
    return [(one["event"], json.loads(one["data"])) for one in reader.events()]


def texts(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(data["text"] for kind, data in events if kind == "token")


def without_id(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "id"}


@asynccontextmanager
async def open_stream(service: Service, path: str, **body: Any) -> AsyncIterator[Reader]:
    """Open a stream over a socket; leaving the context disconnects."""
    http = httpx.AsyncClient(base_url=service.url, headers=service.headers["alice"], timeout=120)
    async with http, http.stream("POST", path, json=ASK | body) as response:
        yield Reader(response)


def test_the_pieces_are_the_completion_and_the_end_is_the_whole_reply(service: Service) -> None:
    deployment = service.deployment("one")
    whole = service.call("POST", path_of(deployment), json={"prompt": "a case"}).json()
    answer = service.call("POST", path_of(deployment), json=ASK)
    events = events_of(answer)
    assert answer.status_code == 200
    assert answer.headers["x-deployment-id"] == deployment
    assert answer.headers["x-request-id"]
    assert [kind for kind, _ in events][-1] == "done"
    assert {kind for kind, _ in events[:-1]} == {"token"}
    assert len(events) > 2
    assert texts(events) == ANSWER
    assert without_id(events[-1][1]) == without_id(whole)


def test_lines_instead_of_events_for_those_who_ask_for_them(service: Service) -> None:
    deployment = service.deployment("one")
    accept = {"Accept": "application/x-ndjson"}
    answer = service.call("POST", path_of(deployment), json=ASK, headers=accept)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *pieces, last = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(piece["text"] for piece in pieces) == ANSWER == last["completion"]


def test_an_endpoint_streams_and_says_who_answered(service: Service) -> None:
    deployment = service.deployment("one")
    body = {"name": "e", "deployment_id": deployment}
    endpoint = service.call("POST", "/v1/endpoints", json=body).json()["id"]
    answer = service.call("POST", f"/v1/endpoints/{endpoint}/generate", json=ASK)
    assert texts(events_of(answer)) == ANSWER
    assert answer.headers["x-deployment-id"] == deployment


def test_text_is_sent_before_the_model_has_finished_and_no_part_of_a_stop_text(
    service: Service,
) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = len(service.engines.answer) - 1

    async def listen() -> str:
        async with open_stream(service, path_of(deployment), stop=["skin"]) as reader:
            await reader.read_until(lambda one: "Diseases of the" in _text(one))
            early = _text(reader)
            service.engines.may_go_on.set()
            await reader.read_until(lambda one: "event: done" in one.text)
            assert _text(reader) == "Diseases of the "
            assert json.loads(reader.events()[-1]["data"])["finish_reason"] == "stop"
            return early

    assert asyncio.run(listen()) in ("Diseases of the", "Diseases of the ")


def _text(reader: Reader) -> str:
    return texts(events_read(reader))


@pytest.mark.parametrize(
    ("change", "status"),
    [({"prompt": "word " * 5000}, 422), ({"max_tokens": 10_000}, 422), ({"stream": "yes"}, 422)],
)
def test_a_refusal_is_a_plain_answer(service: Service, change: dict[str, Any], status: int) -> None:
    deployment = service.deployment("one")
    answer = service.call("POST", path_of(deployment), json=ASK | change)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, "validation_error")


def test_a_failure_before_the_first_text_is_a_plain_answer(start: Start) -> None:
    service = start(generate_timeout_s=0.2)
    deployment = service.deployment("one")
    service.engines.may_answer.clear()
    answer = service.call("POST", path_of(deployment), json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-deployment-id"] == deployment
    assert counts(service, deployment) == (1, 1)
    service.engines.may_answer.set()


def test_a_later_failure_is_the_last_event_and_an_error_of_the_deployment(
    service: Service,
) -> None:
    """The test lets the deadline pass once there is text, because a short deadline could pass before."""
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 2

    def let_it_pass() -> None:
        (visit,) = service.parts.in_flight._running[deployment]
        assert visit.limit is not None
        visit.limit.reschedule(service.loop.time())

    async def listen() -> Reader:
        async with open_stream(service, path_of(deployment)) as reader:
            await reader.read_until(lambda one: bool(_text(one)))
            service.loop.call_soon_threadsafe(let_it_pass)
            await reader.read_until(lambda one: events_read(one)[-1][0] == "error")
            return reader

    reader = asyncio.run(listen())
    *pieces, (kind, last) = events_read(reader)
    assert reader.response.status_code == 200
    assert ANSWER.startswith(texts(pieces))
    assert texts(pieces)
    assert kind == "error"
    assert last["error"]["code"] == "internal_error"
    assert last["error"]["message"] == "the generation took too long"
    assert last["error"]["request_id"] == reader.response.headers["x-request-id"]
    assert counts(service, deployment) == (1, 1)
    service.until(lambda: not service.engines.replicas[0].running)


def test_a_replica_that_dies_in_the_middle_is_the_last_event(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 2

    async def listen() -> list[dict[str, str]]:
        async with open_stream(service, path_of(deployment)) as reader:
            await reader.read_until(lambda one: bool(_text(one)))
            service.engines.replicas[0].kill()
            await reader.read_until(lambda one: "event: error" in one.text)
            return reader.events()

    last = asyncio.run(listen())[-1]
    assert json.loads(last["data"])["error"]["code"] == "internal_error"
    assert counts(service, deployment) == (1, 1)


def test_a_stream_counts_as_a_whole_answer_does(service: Service) -> None:
    deployment = service.deployment("one")

    def tokens() -> dict[str, Any]:
        metrics = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()
        return metrics["summary"]["token_usage"]

    service.call("POST", path_of(deployment), json={"prompt": "a case"})
    once = tokens()
    service.call("POST", path_of(deployment), json=ASK)
    assert counts(service, deployment) == (2, 0)
    twice = tokens()
    assert {name: 2 * value for name, value in once.items() if name.startswith("total")} == {
        name: value for name, value in twice.items() if name.startswith("total")
    }


def test_a_reader_who_disconnects_frees_the_slot(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 2

    async def leave() -> None:
        async with open_stream(service, path_of(deployment)) as reader:
            await reader.read_until(lambda one: bool(_text(one)))
            assert service.engines.replicas[0].running

    asyncio.run(leave())
    service.until(lambda: not service.engines.replicas[0].running)
    service.until(lambda: lines(service, deployment) == [("info", "the caller disconnected")])
    assert counts(service, deployment) == (0, 0)
    service.engines.may_go_on.set()
    assert texts(events_of(service.call("POST", path_of(deployment), json=ASK))) == ANSWER


def test_a_reader_who_disconnects_before_the_first_text_frees_it_too(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.may_answer.clear()

    async def leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            headers = service.headers["alice"]
            asking = asyncio.create_task(
                http.post(service.url + path_of(deployment), json=ASK, headers=headers)
            )
            while not service.engines.prompts:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.01)
            asking.cancel()

    asyncio.run(leave())
    service.until(lambda: not service.engines.replicas[0].running)
    service.until(lambda: lines(service, deployment) == [("info", "the caller disconnected")])
    service.engines.may_answer.set()


def test_a_stream_holds_its_place_until_its_end_and_gives_it_back(service: Service) -> None:
    deployment = service.deployment("one")
    service.limit(slots=RequestSlots(generations=InFlightLimits(each=1, together=2)))
    service.listen()
    service.engines.tokens_before_pause = 2

    async def listen() -> int:
        async with open_stream(service, path_of(deployment)) as reader:
            await reader.read_until(lambda one: bool(_text(one)))
            status = (await service_ask()).status_code
            service.engines.may_go_on.set()
            await reader.read_until(lambda one: "event: done" in one.text)
            return status

    async def service_ask() -> httpx.Response:
        return await asyncio.to_thread(
            service.call, "POST", path_of(deployment), json={"prompt": "a"}
        )

    assert asyncio.run(listen()) == 429
    service.until(
        lambda: service.call("POST", path_of(deployment), json={"prompt": "a"}).status_code == 200
    )


def test_a_drain_lets_a_stream_finish(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 2

    async def listen() -> str:
        async with open_stream(service, path_of(deployment)) as reader:
            await reader.read_until(lambda one: bool(_text(one)))
            service.loop.call_soon_threadsafe(service.parts.drain.begin)
            refused = await asyncio.to_thread(
                service.call, "POST", path_of(deployment), json={"prompt": "a"}
            )
            assert refused.status_code == 503
            service.engines.may_go_on.set()
            await reader.read_until(lambda one: "event: done" in one.text)
            return _text(reader)

    assert asyncio.run(listen()) == ANSWER


def test_an_injected_empty_answer_has_no_text(start: Start) -> None:
    service = start(allow_fault_injection=True)
    deployment = service.deployment("one", tags={"fault.empty_rate": "1"})
    ((kind, reply),) = events_of(service.call("POST", path_of(deployment), json=ASK))
    assert (kind, reply["completion"]) == ("done", "")


def test_a_fault_of_ours_in_the_middle_says_nothing_of_itself(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = service.deployment("one")
    tokenizer: Any = service.parts.catalogue.default.tokenizer
    broken = _Breaking(tokenizer)
    object.__setattr__(service.parts.catalogue.default, "tokenizer", broken)
    try:
        with caplog.at_level(logging.ERROR):
            *_, (kind, last) = events_of(service.call("POST", path_of(deployment), json=ASK))
    finally:
        object.__setattr__(service.parts.catalogue.default, "tokenizer", tokenizer)
    assert (kind, last["error"]["message"]) == ("error", "the service failed unexpectedly")
    assert "secret" not in json.dumps(last)
    assert counts(service, deployment) == (1, 1)


class _Breaking:
    """A tokenizer that fails at its tenth decoding."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._left = 10

    def decode(self, tokens: list[int]) -> str:
        self._left -= 1
        if not self._left:
            raise RuntimeError("secret")
        return self._whole.decode(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def test_the_client_gives_pieces_and_then_the_reply(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()

    async def listen() -> list[Any]:
        client = service.client("alice")
        stream = client.deployments.stream(deployment, Generate(prompt="a case"))
        found = [one async for one in stream]
        await client.close()
        return found

    *pieces, last = asyncio.run(listen())
    assert all(isinstance(one, GeneratedText) for one in pieces)
    assert "".join(one.text for one in pieces) == ANSWER == last.completion
