"""Requests whose caller disconnects, is refused or still waits are counted, as are callers who met errors.

The answers are read as the gates read them, so that a field of another name or form fails here.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import pytest
import sqlalchemy as sa

from tests.service.generation.test_generation import path_of
from tests.service.generation.test_generation_streams import open_stream
from tests.support.service.in_process import Service
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.metrics.series import ArmTraffic, InFlightAges
from tuneship.service.context.request_slots import InFlightLimits, RequestSlots
from tuneship.service.generation.drills import PromptLengths, shortened
from tuneship.store.database import tables

Start = Callable[..., Service]
Task = Future[httpx.Response]
LONG = "word " * 5000


class Counts(NamedTuple):
    """The counts of one bucket, as the gates read them."""

    requests: int = 0
    errors: int = 0
    cancelled: int | None = 0
    refused: int | None = 0
    error_callers: int | None = 0


def metrics(service: Service, deployment: str, **query: str) -> dict[str, Any]:
    answer = service.call("GET", f"/v1/deployments/{deployment}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    read = DeploymentMetrics.model_validate(answer.json()).model_dump(mode="json")
    assert read == answer.json()
    return read


def traffic_of(service: Service, deployment: str, **query: str) -> ArmTraffic:
    """Everything that has ended, as one bucket that the gates read."""
    service.clock.ahead += timedelta(days=2)  # so that the bucket is complete
    start = (service.clock() - timedelta(days=5)).isoformat()
    answer = metrics(service, deployment, start_time=start, interval="1d", **query)
    service.clock.ahead -= timedelta(days=2)
    found = [one.candidate for one in read_series(answer, answer, "1d").buckets]
    return next((one for one in found if any(counts_of(one))), found[0])


def counts_of(traffic: ArmTraffic) -> Counts:
    return Counts(
        traffic.requests,
        traffic.errors,
        traffic.cancelled,
        traffic.refused,
        traffic.error_callers,
    )


def counted(service: Service, deployment: str, **query: str) -> Counts:
    return counts_of(traffic_of(service, deployment, **query))


def waiting(service: Service, deployment: str, **query: str) -> InFlightAges:
    answer = metrics(service, deployment, **query)
    found = read_series(answer, answer, "1m").in_flight["candidate"]
    assert found is not None
    assert found.counts[-1] == answer["in_flight"]["requests"]
    assert 10_000.0 in found.edges_ms
    return found


@contextlib.contextmanager
def asking(service: Service, path: str, **body: Any) -> Iterator[Task]:
    """Send a request that waits in the queue, and cancel it at the end unless it was answered."""
    asked = len(service.engines.prompts)
    task: Task = asyncio.run_coroutine_threadsafe(
        service.ask("POST", path, json={"prompt": "a case"} | body), service.loop
    )
    service.until(lambda: len(service.engines.prompts) > asked)
    try:
        yield task
    finally:
        task.cancel()


@pytest.mark.both_databases
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_in_the_queue_is_counted_by_deployment_and_endpoint(
    service: Service, stream: bool
) -> None:
    """The request uses a socket, because only there can a caller disconnect."""
    deployment = service.deployment("one")
    endpoint, other = (service.canary(name, {deployment: 100}) for name in ("canary", "other"))
    service.listen()
    service.engines.may_answer.clear()
    with asking(service, f"/v1/endpoints/{endpoint}/generate", stream=stream):
        assert waiting(service, deployment).counts[-1] == 1
        assert waiting(service, deployment, endpoint_id=endpoint).counts[-1] == 1
        assert waiting(service, deployment, endpoint_id=other).counts[-1] == 0
    service.until(lambda: waiting(service, deployment).counts[-1] == 0)
    service.engines.may_answer.set()
    assert counted(service, deployment) == Counts(cancelled=1)
    assert counted(service, deployment, endpoint_id=endpoint).cancelled == 1
    assert counted(service, deployment, endpoint_id=other) == Counts()


def test_a_disconnect_in_the_middle_of_a_stream_is_counted(service: Service) -> None:
    deployment = service.deployment("one")
    service.listen()
    service.engines.tokens_before_pause = 2

    async def leave() -> None:
        async with open_stream(service, path_of(deployment)) as reader:
            await reader.read_until(lambda one: "event: token" in one.text)
            found = await asyncio.to_thread(waiting, service, deployment)
            assert found.counts[-1] == 1

    asyncio.run(leave())
    service.until(lambda: waiting(service, deployment).counts[-1] == 0)
    assert counted(service, deployment) == Counts(cancelled=1)
    service.engines.may_go_on.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_or_answer_that_ended_is_no_cancelled_one(service: Service, stream: bool) -> None:
    deployment = service.deployment("one")
    service.call("POST", path_of(deployment), json={"prompt": "a case", "stream": stream})
    assert counted(service, deployment) == Counts(requests=1)
    assert waiting(service, deployment).counts[-1] == 0


def test_the_age_of_what_is_in_flight_begins_with_its_request(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = service.deployment("one")
    service.engines.may_answer.clear()
    with asking(service, path_of(deployment)) as task:
        assert not waiting(service, deployment).older_than(10_000)
        later = time.perf_counter() + 33.0
        with monkeypatch.context() as patch:
            patch.setattr("tuneship.service.telemetry.in_flight.time.perf_counter", lambda: later)
            assert waiting(service, deployment).older_than(10_000) == [(30_000.0, 40_000.0, 1)]
        past = (service.clock() - timedelta(minutes=1)).isoformat()
        assert "in_flight" not in metrics(service, deployment, end_time=past)
        soon = (service.clock() + timedelta(minutes=1)).isoformat()
        assert waiting(service, deployment, end_time=soon).counts[-1] == 1
        service.engines.may_answer.set()
        assert task.result(60).status_code == 200


def test_nobody_sees_what_others_ask_for_in_the_name_of_a_deployment(service: Service) -> None:
    """A request counts as in flight only once its deployment is known to belong to the caller."""
    deployment = service.deployment("one")
    assert (
        service.call("POST", path_of(deployment), "bob", json={"prompt": LONG}).status_code == 404
    )
    assert counted(service, deployment) == Counts()


REFUSED: Mapping[str, dict[str, Any]] = {
    "too long a prompt": {"prompt": LONG},
    "too many tokens": {"prompt": "a", "max_tokens": 10_000},
    "too long a prompt of a stream": {"prompt": LONG, "stream": True},
}


@pytest.mark.both_databases
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_by_the_deployment_itself_is_counted(service: Service, case: str) -> None:
    deployment = service.deployment("one")
    endpoint = service.canary("canary", {deployment: 100})
    path = f"/v1/endpoints/{endpoint}/generate"
    assert service.call("POST", path, json=REFUSED[case]).status_code == 422
    assert counted(service, deployment) == Counts(refused=1)
    assert counted(service, deployment, endpoint_id=endpoint).refused == 1


def test_a_refusal_before_a_deployment_is_asked_is_not_counted(service: Service) -> None:
    deployment = service.deployment("one")
    path, body = path_of(deployment), {"prompt": "a"}
    less = service.key_headers("alice", frozenset({"metrics:read"}))
    assert service.call("POST", path, None, json=body).status_code == 401
    assert service.call("POST", path, None, json=body, headers=less).status_code == 403
    assert service.call("POST", path, json=body | {"max_tokens": "many"}).status_code == 422
    service.limit(slots=RequestSlots(generations=InFlightLimits(each=1, together=2)))
    service.engines.may_answer.clear()
    with asking(service, path):
        assert service.call("POST", path, json=body).status_code == 429
    service.until(lambda: waiting(service, deployment).counts[-1] == 0)
    service.engines.may_answer.set()
    assert counted(service, deployment).refused == 0


def test_a_deployment_that_cannot_serve_has_an_error_not_a_refusal(service: Service) -> None:
    deployment = service.deployment("one")
    service.rest()
    service.call("DELETE", f"/v1/deployments/{deployment}")
    assert service.call("POST", path_of(deployment), json={"prompt": "a"}).status_code == 409
    assert counted(service, deployment) == Counts(requests=1, errors=1, error_callers=1)


@pytest.mark.both_databases
def test_errors_have_as_many_callers_as_there_are_routing_keys_or_else_api_keys(
    service: Service,
) -> None:
    deployment = service.deployment("one", tags={"fault.error_rate": "1"})
    second = service.key_headers("alice")

    def ask(key: str | None = None, **headers: str) -> None:
        own = {"X-Routing-Key": key} if key else {}
        answer = service.call(
            "POST",
            path_of(deployment),
            None if headers else "alice",
            json={"prompt": "a"},
            headers=own | headers,
        )
        assert answer.status_code == 500

    for key in (None, None, "patient 7", "patient 7", "patient 8"):
        ask(key)
    ask(None, **second)
    ask("patient 7", **second)
    traffic = counted(service, deployment)
    assert (traffic.errors, traffic.error_callers) == (7, 4)


def test_neither_routing_key_nor_prompt_is_stored_or_logged(service: Service) -> None:
    deployment = service.deployment("one", tags={"fault.error_rate": "0.5", "fault.refuse": "0.5"})
    secret = {"prompt": "planted-prompt", "stop": ["planted-stop"]}
    headers = {"X-Routing-Key": "planted-key"}
    statuses = {
        service.call("POST", path_of(deployment), json=secret, headers=headers).status_code
        for _ in range(40)
    }
    assert statuses == {200, 422, 500}
    service.call(
        "POST", path_of(deployment), json={"prompt": "planted-prompt " * 3000}, headers=headers
    )
    assert counted(service, deployment).error_callers == 1
    service.supervisor.records.store_logs()
    with service.database.read() as connection:
        for table in tables.METADATA.sorted_tables:
            assert "planted" not in repr(connection.execute(sa.select(table)).all()), table.name
    assert not [line for line in service.log.texts if "planted" in line]


def test_the_time_limit_of_a_generation_is_reported_before_anything_is_shifted(
    start: Start,
) -> None:
    service = start(generate_timeout_s=7.5)
    deployment = service.deployment("one")
    assert metrics(service, deployment)["generate_timeout_seconds"] == 7.5


@pytest.mark.parametrize("end", ["caller", "time-out"])
def test_a_hanging_request_ends_with_its_caller_or_with_the_time(start: Start, end: str) -> None:
    service = start(allow_fault_injection=True, generate_timeout_s=0.3 if end == "time-out" else 60)
    deployment = service.deployment("one", tags={"fault.hang": "1"})
    if end == "time-out":
        assert service.call("POST", path_of(deployment), json={"prompt": "a"}).status_code == 500
        assert (counted(service, deployment).errors, counted(service, deployment).cancelled) == (
            1,
            0,
        )
        return
    service.listen()
    task = asyncio.run_coroutine_threadsafe(
        service.ask("POST", path_of(deployment), json={"prompt": "a"}), service.loop
    )
    service.until(lambda: waiting(service, deployment).counts[-1] == 1)
    task.cancel()
    service.until(lambda: waiting(service, deployment).counts[-1] == 0)
    assert counted(service, deployment) == Counts(cancelled=1)


def test_the_longest_prompts_are_refused_in_the_words_of_a_smaller_context(
    service: Service,
) -> None:
    deployment = service.deployment("one", tags={"fault.refuse": "0.2"})
    answers = [
        (words, service.call("POST", path_of(deployment), json={"prompt": "word " * words}))
        for _ in range(15)
        for words in (5, 10, 15, 40)
    ]
    refused = [(words, answer.status_code == 422) for words, answer in answers]
    known = refused[24:]  # the first ones have nothing to be compared with
    assert {words for words, was_refused in known if was_refused} == {40}
    error = next(one.json()["error"] for _, one in answers if one.status_code == 422)
    real = service.call("POST", path_of(deployment), json={"prompt": LONG}).json()["error"]
    assert {**error, "request_id": 0, "message": 0, "details": 0} == {
        **real,
        "request_id": 0,
        "message": 0,
        "details": 0,
    }
    assert error["message"].startswith("prompt has ")
    assert (
        counted(service, deployment).refused == sum(was_refused for _, was_refused in refused) + 1
    )


def test_the_share_that_is_refused_is_the_one_that_was_asked_for() -> None:
    lengths = PromptLengths()
    dice = random.Random(4)  # noqa: S311 - prompts of a test
    for share in (0.0, 0.1, 0.5, 1.0):
        drawn = [dice.randrange(1, 9) for _ in range(2000)]
        count = sum(lengths.is_among_longest(f"dep_{share}", one, share) for one in drawn)
        error = (share * (1 - share) * len(drawn)) ** 0.5
        assert count == pytest.approx(share * len(drawn), abs=6 * error)


@pytest.mark.parametrize(
    ("text", "short", "share"),
    [
        ("", "", 1.0),
        (" \n ", " \n ", 1.0),
        ("one", "one", 1.0),
        (" a b c d", " a", 0.25),
        ("a b c d e f\ng h i j k", "a b", 2 / 11),
    ],
)
def test_a_fifth_of_the_words_is_left_and_at_least_one(text: str, short: str, share: float) -> None:
    assert shortened(text) == (short, share)


@pytest.mark.parametrize("stream", [False, True])
def test_short_answers_are_short_in_text_stream_and_tokens(service: Service, stream: bool) -> None:
    deployment = service.deployment("one", tags={"fault.short": "1"})
    whole = service.deployment("two")
    answers = [
        service.call("POST", path_of(one), json={"prompt": "a", "stream": stream})
        for one in (deployment, whole)
    ]
    short, full = (traffic_of(service, one).output_tokens for one in (deployment, whole))
    assert short is not None
    assert full is not None
    assert 1 <= short < full / 2
    if stream:
        assert answers[0].text.count("event: token") == 1
        assert '"text":"Diseases"' in answers[0].text
    else:
        assert answers[0].json()["completion"] == "Diseases"


@pytest.mark.parametrize("value", ["-0.1", "1.1", "much", "nan"])
@pytest.mark.parametrize("name", ["hang", "refuse", "short"])
def test_a_bad_share_is_refused_by_its_name(shared: Service, name: str, value: str) -> None:
    tags = {f"fault.{name}": value}
    body = {"model_name": "tuneship-tiny", "deployment_name": "bad", "tags": tags}
    refused = shared.call("POST", "/v1/deployments", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "tags")
    assert f"fault.{name} must be a number from 0 to 1" in refused.json()["error"]["message"]
