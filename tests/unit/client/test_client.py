"""The client over broken and lying networks: what it repeats and what it raises, alike for both clients."""

import io
import json
import ssl
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from tests.unit.client.both_clients import Handler, both
from tuneship.client import Client, base_url
from tuneship.client.core import (
    LONGEST_RETRY_AFTER_S,
    HttpAnswer,
    Pause,
    converse,
    retry_after_seconds,
)
from tuneship.contract import (
    datasets,
    deployments,
    endpoints,
    evaluations,
    jobs,
    models,
    releases,
    webhooks,
)
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.declaring.operation import DECLARED
from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    BadResponse,
    InternalError,
    InvalidRequestError,
    QuotaExceeded,
    RateLimitExceeded,
    ResourceNotFound,
    ServiceUnreachable,
)

JOB = {
    "id": "ft_1", "base_model": "b", "dataset_id": "ds_1", "fine_tuning_method": "lora",
    "model_name": "m", "status": "running", "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z", "validation_frequency": 0.1, "hyperparameters": {},
    "compute_config": {}, "tags": {},
}  # fmt: skip
CREATED = {
    "id": "ds_1", "name": "d", "format": "instruction", "num_examples": 1, "total_tokens": 2,
    "created_at": "2026-01-01T00:00:00Z", "status": "processed",
}  # fmt: skip


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    error = {"code": code, "message": "m", "type": code, "param": None, "details": []}
    return httpx.Response(status, json={"error": error}, headers=headers)


def talk(
    *answers: httpx.Response | Exception, operation: Any = jobs.get_job
) -> tuple[Any, list[float]]:
    """Play answers to the client's core. Return the reply or the exception, and the pauses that were asked for."""
    call = operation.bind("ft_1")
    conversation = converse(operation, call, len(answers), lambda: 1.0)
    given, pauses, answer = iter(answers), [], None
    try:
        while True:
            step = conversation.send(answer)
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                answer = None
            else:
                one = next(given)
                answer = (
                    HttpAnswer(response=one)
                    if isinstance(one, httpx.Response)
                    else HttpAnswer(failure=one)  # type: ignore[arg-type]
                )
    except StopIteration as end:
        assert next(given, None) is None
        return end.value, pauses
    except (ApiError, BadResponse, ServiceUnreachable) as error:
        return (error, sum(1 for _ in given)), pauses


GOOD = httpx.Response(200, json=JOB)


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_failure_is_repeated_after_a_growing_pause(status: int) -> None:
    reply, pauses = talk(refusal(status, "internal_error"), refusal(status, "internal_error"), GOOD)
    assert (reply.id, pauses) == ("ft_1", [1.0, 2.0])


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxys_failure_without_our_body_is_repeated(status: int) -> None:
    assert talk(httpx.Response(status, text="<html>"), GOOD)[0].id == "ft_1"


def test_the_last_failure_is_raised_when_none_succeeds() -> None:
    (error, left), _ = talk(*[refusal(500, "internal_error")] * 3)
    assert (type(error), error.status, left) == (InternalError, 500, 0)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (refusal(401, "authentication_error"), AuthenticationError),
        (refusal(409, "invalid_request_error"), InvalidRequestError),
        (refusal(429, "quota_exceeded"), QuotaExceeded),
        (refusal(500, "internal_error", **{"X-Should-Retry": "false"}), InternalError),
        (refusal(418, "new_code"), ApiError),
        (httpx.Response(302, headers={"Location": "http://evil"}), ApiError),
    ],
)
def test_a_request_that_cannot_succeed_is_not_repeated(
    answer: httpx.Response, raised: type
) -> None:
    (error, left), pauses = talk(answer, GOOD)
    assert (type(error), left, pauses) == (raised, 1, [])


def test_should_retry_wins_over_the_status() -> None:
    busy = refusal(409, "invalid_request_error", **{"X-Should-Retry": "true"})
    assert talk(busy, GOOD)[0].id == "ft_1"


def test_retry_after_wins_over_the_usual_pause() -> None:
    limited = refusal(429, "rate_limit_exceeded", **{"Retry-After": "7"})
    assert talk(limited, GOOD)[1] == [7.0]
    (error, _), _ = talk(limited)
    assert (type(error), error.retry_after) == (RateLimitExceeded, 7)


def test_retry_after_is_seconds_or_a_date_and_has_a_cap() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert retry_after_seconds("2", now) == 2
    assert retry_after_seconds(date, now) == 90
    assert retry_after_seconds("-5", now) == 0
    assert retry_after_seconds("1e9", now) == LONGEST_RETRY_AFTER_S
    assert retry_after_seconds("soon", now) is None
    assert retry_after_seconds(None, now) is None


@pytest.mark.parametrize(
    "failure",
    [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut")],
)
def test_no_answer_is_repeated_and_then_unreachable(failure: Exception) -> None:
    assert talk(failure, GOOD)[0].id == "ft_1"
    (error, _), _ = talk(failure, failure)
    assert isinstance(error, ServiceUnreachable)
    assert error.retryable


def tls_failure() -> Exception:
    failure = httpx.ConnectError("handshake failed")
    failure.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    return failure


@pytest.mark.parametrize(
    "failure", [tls_failure(), httpx.UnsupportedProtocol("ftp"), httpx.InvalidURL("x")]
)
def test_a_request_that_must_fail_again_is_not_repeated(failure: Exception) -> None:
    (error, left), pauses = talk(failure, GOOD)
    assert (type(error), left, pauses) == (ServiceUnreachable, 1, [])
    assert not error.retryable


@pytest.mark.parametrize("text", ['{"id": "ft', "<html>busy</html>", ""])
def test_a_reading_that_is_no_json_is_repeated_and_then_a_bad_response(text: str) -> None:
    cut = httpx.Response(200, text=text)
    assert talk(cut, GOOD)[0].id == "ft_1"
    (error, _), _ = talk(cut, cut)
    assert isinstance(error, BadResponse)
    assert error.retryable


def test_a_change_that_is_answered_with_no_json_is_not_repeated() -> None:
    (error, left), _ = talk(httpx.Response(200, text="{"), GOOD, operation=jobs.cancel_job)
    assert (type(error), left) == (BadResponse, 1)
    assert error.retryable, "who knows that a repeat is harmless may repeat it"


def test_a_missing_field_is_named_and_an_extra_one_ignored() -> None:
    (error, _), _ = talk(httpx.Response(200, json={k: v for k, v in JOB.items() if k != "status"}))
    assert "status" in str(error)
    assert not error.retryable
    assert talk(httpx.Response(200, json=JOB | {"new": 1}))[0].id == "ft_1"
    assert talk(httpx.Response(200, json=JOB | {"status": "paused"}))[0].status == "paused"


def test_the_message_of_a_bad_response_holds_no_content() -> None:
    (error, _), _ = talk(httpx.Response(200, json=JOB | {"tags": "a patient's name"}))
    assert "patient" not in str(error)


@pytest.mark.parametrize("url", ["http://h", "http://h/", "http://h/v1", "http://h/v1/"])
def test_the_address_is_taken_with_and_without_its_version(url: str) -> None:
    assert base_url(url) == "http://h"


def failing_first(answers: Iterable[httpx.Response]) -> tuple[Handler, list[httpx.Request]]:
    given, seen = iter(list(answers) * 2), []

    def handle(request: httpx.Request) -> httpx.Response:
        request.read()
        seen.append(request)
        # Return a fresh copy, because the clients wrap the stream of each response.
        one = next(given)
        return httpx.Response(one.status_code, content=one.content, headers=one.headers)

    return handle, seen


def test_both_clients_send_the_same_and_return_the_same() -> None:
    handle, seen = failing_first([GOOD])
    one, two = both(handle, lambda client: client.jobs.get("ft_1"))
    assert one == two
    assert [request.url.path for request in seen] == ["/v1/fine-tuning/jobs/ft_1"] * 2
    for request in seen:
        assert request.headers["authorization"] == "Bearer k"
        assert request.headers["x-client-id"] == "c"


def test_options_become_headers() -> None:
    handle, seen = failing_first([GOOD])
    both(
        handle,
        lambda client: client.with_options(
            idempotency_key="one", if_match='"3"', routing_key="r"
        ).jobs.get("ft_1"),
    )
    for request in seen:
        names = ("idempotency-key", "if-match", "x-routing-key")
        assert [request.headers[name] for name in names] == ["one", '"3"', "r"]


def test_a_file_is_sent_again_from_its_start() -> None:
    again = {"Retry-After": "0.01"}
    handle, seen = failing_first(
        [refusal(503, "internal_error", **again), httpx.Response(201, json=CREATED)]
    )
    content = b'{"instruction":"a","response":"b"}\n'
    form = DatasetUpload(name="d", format="instruction", tags={"a": "b"})
    both(handle, lambda client: client.datasets.upload(form, io.BytesIO(content)))
    assert len(seen) == 4
    for request in seen:
        assert content in request.content
        assert json.dumps({"a": "b"}).encode() in request.content


def test_arguments_go_where_they_belong() -> None:
    call = datasets.list_datasets.bind(limit=5, tags={"a[b": "c&d"}, format=None)
    assert call.query == (("limit", "5"), ("tags[a[b]", "c&d"))
    assert jobs.get_job.bind("ft/../x").path == "/v1/fine-tuning/jobs/ft%2F..%2Fx"


TUNING = jobs.JobCreate(base_model="b", dataset_id="ds_1", model_name="m")
NEEDED = {
    "id": "x_1", "name": "n", "status": "s", "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z", "url": "http://x", "deployment_id": "dep_1",
}  # fmt: skip
CREATES: dict[str, Callable[[Any], Any]] = {
    "create_job": lambda client: client.jobs.create(TUNING),
    "upload_dataset": lambda client: client.datasets.upload(
        DatasetUpload(name="d", format="instruction"), io.BytesIO(b"x")
    ),
    "import_model": lambda client: client.call(
        models.import_model, models.ModelImport(name="m"), io.BytesIO(b"x")
    ),
    "merge_datasets": lambda client: client.datasets.merge(
        datasets.DatasetMerge(dataset_ids=["ds_1", "ds_2"], name="d")
    ),
    "create_deployment": lambda client: client.deployments.create(
        deployments.DeploymentCreate(model_name="m", deployment_name="d")
    ),
    "create_endpoint": lambda client: client.endpoints.create(
        endpoints.EndpointCreate(name="e", deployment_id="dep_1")
    ),
    "create_canary_endpoint": lambda client: client.canary_endpoints.create(
        endpoints.CanaryEndpointCreate(
            name="e", deployments=[endpoints.Member(id="dep_1", traffic_percentage=100)]
        )
    ),
    "create_evaluation": lambda client: client.evaluations.create(
        evaluations.EvaluationCreate.model_validate(evaluations.EXAMPLE_CREATE)
    ),
    "create_release": lambda client: client.releases.create(
        releases.ReleaseCreate(run_key="r", kind="release")
    ),
    "create_webhook": lambda client: client.webhooks.create(
        webhooks.WebhookCreate(url="https://x.test", events=["*"])
    ),
}


def keys_of(use: Callable[[Any], Any]) -> list[str | None]:
    """Return the idempotency keys of three failing tries of the blocking client and three of the asynchronous one."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return refusal(503, "internal_error", **{"Retry-After": "0.01"})

    def fails(client: Any) -> Any:
        if isinstance(client, Client):
            with pytest.raises(InternalError):
                use(client)
            return None

        async def fail() -> None:
            with pytest.raises(InternalError):
                await use(client)

        return fail()

    both(handle, fails)
    return [one.headers.get("idempotency-key") for one in seen]


def test_every_create_of_the_contract_is_among_those_that_are_tried() -> None:
    assert set(CREATES) == {one.name for one in DECLARED if one.is_creating}


@pytest.mark.parametrize("create", CREATES)
def test_all_tries_of_a_create_carry_one_key_and_each_call_its_own(create: str) -> None:
    keys = keys_of(CREATES[create])
    assert len(keys) == 6
    blocking, awaited = set(keys[:3]), set(keys[3:])
    assert len(blocking) == len(awaited) == 1
    assert None not in blocking | awaited
    assert blocking != awaited


def test_a_key_that_the_caller_gives_is_the_one_that_is_sent() -> None:
    keys = keys_of(lambda client: client.with_options(idempotency_key="own").jobs.create(TUNING))
    assert set(keys) == {"own"}


def test_a_change_that_is_sent_once_and_a_reading_carry_no_key() -> None:
    once = keys_of(lambda client: client.with_options(tries=1).jobs.cancel("ft_1"))
    assert once == [None, None]
    assert set(keys_of(lambda client: client.jobs.get("ft_1"))) == {None}
    assert set(keys_of(lambda client: client.datasets.delete("ds_1"))) == {None}
    repeated = keys_of(lambda client: client.jobs.cancel("ft_1"))
    assert len(set(repeated)) == 2
    assert None not in repeated


BUSY = refusal(409, "invalid_request_error", **{"X-Should-Retry": "true"})


def keyed(*answers: httpx.Response | Exception, tries: int) -> tuple[Any, list[float]]:
    """Play answers to a create with an idempotency key. Return how it ended, and the pauses."""
    call = replace(jobs.create_job.bind(TUNING), idempotency_key="one")
    talk_of_it = converse(jobs.create_job, call, tries, lambda: 1.0)
    pauses: list[float] = []
    given = iter(answers)
    step = next(talk_of_it)
    try:
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                step = talk_of_it.send(None)
                continue
            one = next(given)
            answer = HttpAnswer(one) if isinstance(one, httpx.Response) else HttpAnswer(failure=one)  # type: ignore[arg-type]
            step = talk_of_it.send(answer)
    except StopIteration as end:
        return end.value, pauses
    except ApiError as error:
        return error, pauses


def test_a_create_that_is_still_being_worked_on_is_waited_for() -> None:
    created = httpx.Response(201, json=JOB)
    job, pauses = keyed(httpx.ReadTimeout("slow"), BUSY, BUSY, BUSY, created, tries=2)
    assert (job.id, pauses) == ("ft_1", [1.0, 1.0, 2.0, 4.0])


def test_a_create_that_is_worked_on_for_ever_is_given_up() -> None:
    error, pauses = keyed(*[BUSY] * 99, tries=1)
    assert (error.status, sum(pauses)) == (409, 60)


GONE = refusal(404, "resource_not_found")
DELETES = [one for one in DECLARED if one.method == "DELETE"]


@pytest.mark.parametrize("operation", DELETES, ids=lambda one: one.name)
def test_a_delete_whose_answer_was_lost_has_succeeded_when_its_repeat_finds_nothing(
    operation: Any,
) -> None:
    (reply, _) = talk(httpx.ReadTimeout("lost"), GONE, operation=operation)
    assert reply.id == "ft_1"
    assert getattr(reply, "status", "deleted") == "deleted"
    assert getattr(reply, "deleted", True) is True


def test_a_model_whose_delete_was_lost_is_named_as_the_caller_named_it() -> None:
    call = models.delete_model.bind("ft:org/base:name:1")
    conversation = converse(models.delete_model, call, 2, lambda: 0.0)
    conversation.send(None)
    conversation.send(HttpAnswer(failure=httpx.ReadError("cut")))
    conversation.send(None)
    with pytest.raises(StopIteration) as end:
        conversation.send(HttpAnswer(response=refusal(404, "model_not_found")))
    assert end.value.value.id == "ft:org/base:name:1"


@pytest.mark.parametrize(
    "first", [httpx.ConnectError("refused"), refusal(503, "internal_error")], ids=["unsent", "busy"]
)
def test_a_delete_that_was_never_obeyed_still_says_that_there_was_nothing(
    first: httpx.Response | Exception,
) -> None:
    (error, _), _ = talk(first, GONE, operation=datasets.delete_dataset)
    assert isinstance(error, ResourceNotFound)
    (error, left), _ = talk(GONE, operation=datasets.delete_dataset)
    assert isinstance(error, ResourceNotFound)
    assert left == 0
