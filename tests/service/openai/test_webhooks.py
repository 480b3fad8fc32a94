"""A program of the `openai` package registers a receiver, and unwraps what the service sends to it."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import openai
import pytest
from openai.types.webhooks import BatchCompletedWebhookEvent

from tests.support.fakes.webhook_receiver import Received, Receiver, answer, listening
from tests.support.openai import evals
from tests.support.openai.batches import batch, ended, request
from tests.support.openai.openai_clients import blocking
from tests.support.service.evaluations import PlayedAnswers, evaluated
from tests.support.service.in_process import Service
from tuneship.contract.openai.webhooks import EVENT_TYPES
from tuneship.events.delivery import DeliveryTiming

pytestmark = pytest.mark.both_databases(postgres="soak")

LOCAL: dict[str, Any] = {
    "webhook_allow_cidrs": ["127.0.0.0/8"],
    "webhook_allow_http_hosts": ["127.0.0.1"],
}
ENDS: list[Any] = ["fine_tuning.job.succeeded", "fine_tuning.job.cancelled", "batch.completed"]


@dataclass(frozen=True)
class Subscribed:
    """A service that delivers webhooks, a receiver that it may call, and a client."""

    service: Service
    receiver: Receiver
    client: openai.OpenAI

    def events(self, secret: str) -> list[Any]:
        """The events that were received, as the client unwraps them."""
        return [unwrapped(self.client, one, secret) for one in self.receiver.received]


def unwrapped(client: openai.OpenAI, received: Received, secret: str) -> Any:
    return client.webhooks.unwrap(received.body, received.headers, secret=secret)


@pytest.fixture
def subscribed(start: Callable[..., Service]) -> Iterator[Subscribed]:
    service, stack = start(**LOCAL), AsyncExitStack()
    service.start_deliveries(DeliveryTiming())
    service.listen()
    receiver = service.run(stack.enter_async_context(listening()))
    with blocking(service) as client:
        yield Subscribed(service, cast("Receiver", receiver), client)
    service.run(stack.aclose())


def test_the_ends_of_jobs_and_batches_arrive_as_the_client_unwraps_them(
    subscribed: Subscribed,
) -> None:
    service, client = subscribed.service, subscribed.client
    made = client.webhooks.create(
        event_types=ENDS, name="mine", url=subscribed.receiver.url("/hook")
    )
    job = service.job()
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.complete()
    cancelled = service.job()
    service.call("POST", f"/v1/fine-tuning/jobs/{cancelled}/cancel")
    batch_id = batch(service, request("a", service.deployment("answers")))
    done = ended(service, batch_id)
    service.until(lambda: len(subscribed.receiver.received) == 3)
    found = {event.type: event for event in subscribed.events(made.signing_secret)}
    assert set(found) == set(ENDS)
    assert found["fine_tuning.job.succeeded"].data.id == job.replace("ft_", "ftjob-")
    assert found["fine_tuning.job.cancelled"].data.id == cancelled.replace("ft_", "ftjob-")
    event = found["batch.completed"]
    assert isinstance(event, BatchCompletedWebhookEvent)
    assert (event.data.id, event.object) == (batch_id, "event")
    assert abs(event.created_at - done["completed_at"]) <= 1
    bodies = [json.loads(one.body) for one in subscribed.receiver.received]
    assert {tuple(body) for body in bodies} == {("id", "object", "created_at", "type", "data")}
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrapped(client, subscribed.receiver.received[0], "whsec_" + "A" * 44)


def test_the_ends_of_runs_of_evals_arrive_and_those_of_evaluations_do_not(
    subscribed: Subscribed,
) -> None:
    service, client = subscribed.service, subscribed.client
    # OpenAI's own runs have null where its types have an error.
    client._strict_response_validation = False
    kinds: list[Any] = ["eval.run.succeeded", "eval.run.failed", "eval.run.canceled"]
    made = client.webhooks.create(event_types=kinds, name="mine", url=subscribed.receiver.url())
    played = PlayedAnswers(service).set_up()
    evaluated(service, played.dataset, played.baseline)
    asked, source = evals.defined(client), evals.source_of(played.baseline, evals.items(40))
    good = client.evals.runs.create(asked.id, data_source=source)
    assert evals.ended(client, service, good).status == "completed"
    service.engines.may_answer.clear()
    gone, stopped = (client.evals.runs.create(asked.id, data_source=source) for _ in "ab")
    client.evals.runs.cancel(stopped.id, eval_id=asked.id)
    path = f"/v1/deployments/{played.baseline}"
    assert service.call("DELETE", path, params={"force": "true"}).status_code == 200
    service.engines.may_answer.set()
    service.until(lambda: len(subscribed.receiver.received) == 3)
    found = {event.type: event.data.id for event in subscribed.events(made.signing_secret)}
    assert found == dict(zip(kinds, (good.id, gone.id, stopped.id), strict=True))


def test_a_receiver_is_registered_changed_and_deleted(subscribed: Subscribed) -> None:
    client, service = subscribed.client, subscribed.service
    assert client.webhooks.event_types.list().data == [*EVENT_TYPES]
    made = client.webhooks.create(event_types=ENDS, name="mine", url=subscribed.receiver.url())
    assert made.signing_secret.startswith("whsec_")
    shown = client.webhooks.retrieve(made.id)
    assert (shown.name, shown.event_types, shown.url) == ("mine", ENDS, made.url)
    assert "whsec_" not in shown.to_json()
    changed = client.webhooks.update(made.id, name="ours", event_types=ENDS[:1])
    assert (changed.name, changed.event_types, changed.url) == ("ours", ENDS[:1], made.url)
    with pytest.raises(openai.BadRequestError):
        client.webhooks.update(made.id)

    again = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert again.signing_secret != made.signing_secret
    job = service.job()
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: len(subscribed.receiver.received) == 1)
    for secret in (made.signing_secret, again.signing_secret):
        assert subscribed.events(secret)[0].type == "fine_tuning.job.succeeded"

    second = client.webhooks.create(event_types=ENDS, name="second", url=subscribed.receiver.url())
    # The main API's own webhooks have another form, and are not listed here.
    hook = {"url": subscribed.receiver.url(), "events": ["*"]}
    other = service.call("POST", "/v1/webhooks", json=hook).json()["id"]
    assert [one.id for one in client.webhooks.list(limit=1)] == [second.id, made.id]
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(other)
    with blocking(service, "bob") as bob, pytest.raises(openai.NotFoundError):
        bob.webhooks.delete(made.id)
    assert client.webhooks.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made.id)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("batch.expired", "batch_"), (ENDS[0], "ftjob-"), ("eval.run.failed", "evl_")],
)
def test_a_test_is_sent_once_and_tells_the_receivers_status(
    subscribed: Subscribed, kind: Any, prefix: str
) -> None:
    client, receiver = subscribed.client, subscribed.receiver
    made = client.webhooks.create(event_types=ENDS, name="mine", url=receiver.url())
    for status in (204, 503):
        receiver.answers["/"] = answer(status)
        tested = client.webhooks.test(made.id, event_type=kind)
        assert (tested.status_code, tested.event_type) == (status, kind)
        assert tested.webhook_endpoint_id == made.id
    events = subscribed.events(made.signing_secret)
    assert [event.type for event in events] == [kind] * 2
    assert all(event.data.id.startswith(prefix) for event in events)
    assert (
        subscribed.service.call("GET", "/v1/events", params={"limit": 100}).json()["events"] == []
    )


def test_a_test_without_an_answer_says_why(subscribed: Subscribed) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}/"
        made = subscribed.client.webhooks.create(event_types=ENDS, name="mine", url=url)
        with pytest.raises(openai.BadRequestError) as caught:
            subscribed.client.webhooks.test(made.id, event_type="batch.completed")
    assert caught.value.code == "connection_failed"
    with blocking(subscribed.service, "bob") as bob, pytest.raises(openai.NotFoundError):
        bob.webhooks.test(made.id, event_type="batch.completed")


def test_bad_receivers_are_refused_by_openais_names(subscribed: Subscribed) -> None:
    good: dict[str, Any] = {"event_types": ENDS, "name": "n", "url": subscribed.receiver.url()}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"event_types": ["response.completed"]}, "event_types[0]"),
        ({"event_types": []}, "event_types"),
        ({"name": "a\nb"}, "name"),
        ({"url": "http://zq-planted.example/"}, "url"),
        ({"url": "https://169.254.169.254/"}, "url"),
    ]
    for fields, param in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            subscribed.client.webhooks.create(**{**good, **fields})
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)
        assert "planted" not in json.dumps(caught.value.body)


def test_a_failed_and_a_cancelled_batch_are_distinguished(subscribed: Subscribed) -> None:
    service = subscribed.service
    kinds: list[Any] = ["batch.failed", "batch.cancelled"]
    made = subscribed.client.webhooks.create(
        event_types=kinds, name="n", url=subscribed.receiver.url()
    )
    failed = batch(service, {"custom_id": "a"})
    service.spare = lambda _: False
    cancelled = batch(service, request("a", "tuneship-tiny"))
    subscribed.client.batches.cancel(cancelled)
    service.until(lambda: len(subscribed.receiver.received) == 2)
    found = {event.type: event.data.id for event in subscribed.events(made.signing_secret)}
    assert found == {"batch.failed": failed, "batch.cancelled": cancelled}
