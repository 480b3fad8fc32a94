"""Tasks of the canary: the headers that each call carries, and the calls that are repeated."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from pydantic import SecretStr

from tasks.endpoints import (
    create_canary_endpoint,
    get_canary_endpoint,
    list_canary_endpoints,
    renew_canary_lease,
    update_canary_endpoint,
)
from tasks.metrics import get_deployment_metrics
from tuneship.client import ApiError, Client
from tuneship.contract import jobs
from tuneship.contract.endpoints import LeaseRequest, Member
from tuneship.contract.generation import Generate, generate, generate_by_endpoint
from tuneship.prefect import connection
from tuneship.prefect.tasks import task_of, task_of_pages
from tuneship.settings import ClientSettings

SPLIT = {"dep_a": 95, "dep_b": 5}
MOMENT = "2026-01-05T08:00:00Z"
ENDPOINT = {
    "id": "cep_1",
    "name": "shop",
    "deployments": [{"id": "dep_a", "traffic_percentage": 100}],
    "url": "http://localhost/v1/endpoints/cep_1/generate",
    "created_at": MOMENT,
    "updated_at": MOMENT,
    "status": "active",
    "version": 1,
}
GENERATION = {
    "id": "gen_1",
    "deployment_id": "dep_a",
    "prompt": "p",
    "completion": "c",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
METRICS = {
    "deployment_id": "dep_a",
    "start_time": MOMENT,
    "end_time": MOMENT,
    "interval": "1m",
    "metrics": {},
    "summary": {},
}


class Wire:
    """Play the answers one after another (the last one for ever), and keep the requests."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.answers: list[tuple[int, dict[str, Any]]] = [(200, ENDPOINT)]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return httpx.Response(status, json=body)


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Replace the network by a played wire."""
    played = Wire()
    settings = ClientSettings(url="http://service", api_key=SecretStr("key"), client_id="tests")
    connection.connect(settings, Client(settings, transport=httpx.MockTransport(played)))
    yield played
    connection.disconnect()


def test_a_create_carries_the_same_idempotency_key_each_time(wire: Wire) -> None:
    create_canary_endpoint.fn("shop", SPLIT, "rollout-1")
    create_canary_endpoint.fn("shop", SPLIT, "rollout-1")
    create_canary_endpoint.fn("shop", SPLIT, "rollout-2")

    first, again, other = [request.headers["Idempotency-Key"] for request in wire.asked]
    assert first == again != other


def test_a_shift_is_sent_once_with_if_match_and_lease_and_no_idempotency_key(wire: Wire) -> None:
    wire.answers = [(503, {})]
    fallback = [Member(id="dep_a", traffic_percentage=100)]

    with pytest.raises(ApiError):
        update_canary_endpoint.fn("cep_1", SPLIT, 5, 3, LeaseRequest(seconds=30, fallback=fallback))

    (request,) = wire.asked
    assert request.headers["If-Match"] == '"3"'
    assert "Idempotency-Key" not in request.headers
    assert b'"lease"' in request.content


def test_a_plain_shift_names_nothing_that_a_bare_server_does_not_know(wire: Wire) -> None:
    update_canary_endpoint.fn("cep_1", SPLIT, 5)

    (request,) = wire.asked
    assert "If-Match" not in request.headers
    assert b"lease" not in request.content


def test_a_look_at_metrics_asks_twice_at_most_and_without_a_pause(wire: Wire) -> None:
    wire.answers = [(503, {}), (200, METRICS)]
    answer = get_deployment_metrics.fn("dep_a", interval="1m")
    assert answer.end_time == datetime.fromisoformat(MOMENT)

    wire.answers = [(503, {})]
    with pytest.raises(ApiError):
        get_deployment_metrics.fn("dep_a", interval="1m")
    assert len(wire.asked) == 4


def test_metrics_that_are_refused_for_good_are_not_asked_again(wire: Wire) -> None:
    wire.answers = [(404, {})]

    with pytest.raises(ApiError):
        get_deployment_metrics.fn("dep_a", interval="1s", endpoint_id="cep_1")

    (request,) = wire.asked
    assert dict(request.url.params) == {"interval": "1s", "endpoint_id": "cep_1"}


def test_reads_renewals_and_generations_go_where_they_belong(wire: Wire) -> None:
    get_canary_endpoint.fn("cep_1")
    renew_canary_lease.fn("cep_1", 30)
    page = {"total": 1, "limit": 20, "offset": 0, "next_offset": None}
    wire.answers = [(200, {"canary_endpoints": [ENDPOINT], "pagination": page})]
    assert list_canary_endpoints.fn("shop").canary_endpoints[0].id == "cep_1"
    wire.answers = [(200, GENERATION)]
    task_of(generate).fn("dep_a", Generate(prompt="p"))
    task_of(generate_by_endpoint).fn("cep_1", Generate(prompt="p"))

    assert [(request.method, request.url.path) for request in wire.asked] == [
        ("GET", "/v1/canary-endpoints/cep_1"),
        ("POST", "/v1/canary-endpoints/cep_1/lease"),
        ("GET", "/v1/canary-endpoints"),
        ("POST", "/v1/deployments/dep_a/generate"),
        ("POST", "/v1/endpoints/cep_1/generate"),
    ]


def test_a_made_task_lists_all_pages(wire: Wire) -> None:
    pages = {"total": 2, "limit": 100, "offset": 0}
    job = {
        "id": "ft_1", "base_model": "b", "model_name": "m", "status": "queued",
        "created_at": MOMENT, "updated_at": MOMENT, "fine_tuning_method": "lora",
    }  # fmt: skip
    wire.answers = [
        (200, {"jobs": [job], "pagination": {**pages, "next_offset": 100}}),
        (200, {"jobs": [{**job, "id": "ft_2"}], "pagination": {**pages, "next_offset": None}}),
    ]

    listed = task_of_pages(jobs.Jobs.iterate).fn(status=jobs.JobStatus.QUEUED)

    assert [job.id for job in listed] == ["ft_1", "ft_2"]
    first, second = [dict(request.url.params) for request in wire.asked]
    assert first == {"limit": "100", "status": "queued"}
    assert second == {**first, "offset": "100"}


def test_every_try_of_a_made_task_carries_the_key_of_its_task_run(wire: Wire) -> None:
    wire.answers = [(200, {"id": "ft_1", "status": "cancelling", "updated_at": MOMENT})]
    cancel = task_of(jobs.cancel_job)
    run, other_run = (
        TaskRunContext.model_construct(task_run=TaskRun.model_construct(id=uuid4()))
        for _ in range(2)
    )

    for context in (run, run, other_run):
        with context:
            cancel.fn("ft_1")

    first, again, other = [request.headers["Idempotency-Key"] for request in wire.asked]
    assert first == again != other
