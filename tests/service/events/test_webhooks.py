"""Webhooks are registered, notified, tested, switched off and on; missed events are sent again or fetched."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook as Verifier

from deployments.local import bridge_opened
from tests.support.fakes.webhook_receiver import Receiver, answer, listening
from tests.support.service.in_process import OWN_PORT, Service
from tuneship.contract.common import render_time
from tuneship.contract.events import KINDS, SUBSCRIPTIONS
from tuneship.contract.webhooks import Replay, SecretRotation, WebhookCreate, WebhookUpdate
from tuneship.events.connector import LOOKUPS
from tuneship.events.delivery import DeliveryTiming
from tuneship.settings import LocalSettings
from tuneship.store.database import tables
from tuneship.store.records import outbox

Start = Callable[..., Service]
HOOK = {"url": "https://receiver.test/hook", "events": ["*"]}
LOCAL = {"webhook_allow_cidrs": ["127.0.0.0/8"], "webhook_allow_http_hosts": ["127.0.0.1"]}

pytestmark = pytest.mark.both_databases


def create(service: Service, client: str = "alice", **fields: Any) -> dict[str, Any]:
    created = service.call("POST", "/v1/webhooks", client, json=HOOK | fields)
    assert created.status_code == 201, created.text
    return created.json()


def path_of(webhook: dict[str, Any], rest: str = "") -> str:
    return f"/v1/webhooks/{webhook['id']}{rest}"


def deliveries(service: Service, webhook: dict[str, Any], **query: Any) -> list[dict[str, Any]]:
    found = service.call("GET", path_of(webhook, "/deliveries"), params=query)
    assert found.status_code == 200, found.text
    return found.json()["deliveries"]


def dump(service: Service) -> str:
    with service.database.read() as connection:
        return "".join(
            repr([dict(row) for row in connection.execute(sa.select(table)).mappings()])
            for table in tables.METADATA.tables.values()
        )


@pytest.fixture
def local(start: Start, request: pytest.FixtureRequest) -> Iterator[tuple[Service, Receiver]]:
    """A service that delivers webhooks, with the test's own timing if it has one, and a receiver that it may call."""
    service, stack = start(**LOCAL), AsyncExitStack()
    service.start_deliveries(getattr(request, "param", None))
    yield service, service.run(stack.enter_async_context(listening()))
    service.run(stack.aclose())


def test_make_up_opens_the_bridge_to_webhooks_and_not_the_prefect_server(start: Start) -> None:
    """Any tenant may register a webhook: no request that a tenant has caused comes to the Prefect server."""
    local = LocalSettings()
    chosen = bridge_opened(local)["TUNESHIP_WEBHOOK_ALLOW_HTTP_HOSTS"]
    service = start(webhook_allow_http_hosts=chosen)
    create(service, url=f"http://127.0.0.1:{local.bridge_port}/")
    for scheme in ("http", "https"):
        url = f"{scheme}://127.0.0.1:{local.prefect_port}/api/deployments/d/pause_deployment"
        refused = service.call("POST", "/v1/webhooks", "alice", json=HOOK | {"url": url})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "validation_error")


def test_names_that_nobody_answers_for_take_few_of_the_threads(service: Service) -> None:
    """Unanswered look-ups keep only a few threads, and the requests beyond those are asked to come back."""
    may_answer = threading.Event()
    asked: list[str] = []

    def resolve(host: str, _port: int) -> list[str]:
        asked.append(host)
        may_answer.wait(120)
        return ["9.9.9.9"]

    receivers = replace(service.parts.receivers, resolve=resolve)
    object.__setattr__(service.parts, "receivers", receivers)

    async def ask() -> list[httpx.Response]:
        posts = [
            asyncio.create_task(service.ask("POST", "/v1/webhooks", json=HOOK))
            for _ in range(LOOKUPS)
        ]
        while len(asked) < LOOKUPS:  # noqa: ASYNC110 - threads have no event of the loop
            await asyncio.sleep(0.02)
        posts += [
            asyncio.create_task(service.ask("POST", "/v1/webhooks", "bob", json=HOOK))
            for _ in range(3)
        ]
        done, _ = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            done, _ = await asyncio.wait(posts, timeout=0.05)
        may_answer.set()
        return [await one for one in posts]

    answers = service.run(ask())
    busy = [one for one in answers if one.status_code == 503]
    assert (len(busy), len(asked)) == (3, LOOKUPS)
    assert {one.headers["retry-after"] for one in busy} == {"1"}
    assert [one.status_code for one in answers].count(201) == LOOKUPS


@pytest.mark.parametrize(("url", "is_kept"), [("https://two.test/", False), (HOOK["url"], True)])
def test_a_new_address_begins_without_the_failures_of_the_old_one(
    service: Service, url: str, is_kept: bool
) -> None:
    service.names["two.test"] = ["9.9.9.9"]
    webhook = create(service)
    with service.database.write() as connection:
        connection.execute(sa.update(tables.webhooks).values(failing_since=service.clock()))
    assert service.call("PATCH", path_of(webhook), json={"url": url}).status_code == 200
    with service.database.read() as connection:
        since = connection.execute(sa.select(tables.webhooks.c.failing_since)).scalar_one()
    assert (since is not None) is is_kept


def test_a_secret_is_shown_once_and_stored_nowhere(service: Service) -> None:
    headers = {"Idempotency-Key": "once"}
    created = service.call("POST", "/v1/webhooks", json=HOOK, headers=headers)
    webhook = created.json()
    secret = webhook.pop("secret")
    assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32
    assert created.headers["location"] == path_of(webhook)
    assert webhook == {
        "id": webhook["id"],
        "url": HOOK["url"],
        "events": ["*"],
        "description": "",
        "active": True,
        "created_at": webhook["created_at"],
        "updated_at": webhook["created_at"],
    }
    again = service.call("POST", "/v1/webhooks", json=HOOK, headers=headers)
    assert (again.content, again.headers["idempotent-replayed"]) == (created.content, "true")
    assert again.headers["location"] == created.headers["location"]
    assert service.call("GET", path_of(webhook)).json() == webhook
    page = service.call("GET", "/v1/webhooks").json()
    assert page["webhooks"] == [webhook]
    assert page["pagination"] == {"total": 1, "limit": 20, "offset": 0, "next_offset": None}
    assert secret not in dump(service)
    assert secret[6:] not in dump(service)
    assert secret not in "".join(service.log.texts)


def test_the_twenty_first_webhook_of_a_client_is_one_too_many(start: Start) -> None:
    service = start(maximum_webhooks=2)
    first = create(service)
    create(service)
    refused = service.call("POST", "/v1/webhooks", json=HOOK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    create(service, "bob")
    service.call("DELETE", path_of(first))
    create(service)


@pytest.mark.parametrize("subscription", SUBSCRIPTIONS)
def test_every_subscription_is_taken(shared: Service, subscription: str) -> None:
    created = create(shared, events=[subscription])
    assert created["events"] == [subscription]
    shared.call("DELETE", path_of(created))


def test_an_update_changes_what_it_names(service: Service) -> None:
    webhook = create(service)
    service.clock.ahead += timedelta(seconds=5)
    changes = {"url": "https://receiver.test:8443/", "events": ["dataset.*"], "description": "d"}
    updated = service.call("PATCH", path_of(webhook), json=changes).json()
    del webhook["secret"]
    assert updated == webhook | changes | {"updated_at": updated["updated_at"]}
    assert updated["updated_at"] > webhook["updated_at"]
    service.dataset()
    service.deployment("d")
    kinds = [one["type"] for one in deliveries(service, webhook)]
    assert kinds == ["dataset.processed", "dataset.uploaded"]


def test_deliveries_waiting_for_a_disabled_webhook_are_dead(service: Service) -> None:
    webhook = create(service)
    service.dataset()
    off = service.call("PATCH", path_of(webhook), json={"active": False}).json()
    assert off["active"] is False
    assert [one["status"] for one in deliveries(service, webhook)] == ["dead", "dead"]
    assert {one["failure"] for one in deliveries(service, webhook)} == {"switched_off"}
    service.dataset()
    assert len(deliveries(service, webhook)) == 2
    on = service.call("PATCH", path_of(webhook), json={"active": True}).json()
    assert (on["active"], "disabled_reason" in on) == (True, False)
    service.dataset()
    assert len(deliveries(service, webhook)) == 4


def test_a_deleted_webhook_and_its_deliveries_are_forgotten(service: Service) -> None:
    webhook = create(service)
    service.dataset()
    answer = service.call("DELETE", path_of(webhook))
    assert answer.json() == {"id": webhook["id"], "deleted": True}
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/deliveries"), ("POST", "/test")):
        assert service.call(method, path_of(webhook, rest)).status_code == 404
    with service.database.read() as connection:
        assert connection.execute(sa.select(tables.deliveries)).all() == []
    assert len(service.call("GET", "/v1/events").json()["events"]) == 2


def test_an_event_of_a_newer_version_is_listed(service: Service) -> None:
    service.dataset()
    with service.database.write() as connection:
        newer = sa.update(tables.events).where(tables.events.c.type == "dataset.processed")
        connection.execute(newer.values(type="data_lake.frozen"))
    events = service.call("GET", "/v1/events").json()["events"]
    assert [(one["type"], one["data"]["object"]) for one in events] == [
        ("dataset.uploaded", "dataset"),
        ("data_lake.frozen", "data_lake"),
    ]


def test_the_services_own_port_is_closed_even_where_its_network_is_open(start: Start) -> None:
    service = start(**LOCAL)
    refused = service.call(
        "POST", "/v1/webhooks", json=HOOK | {"url": f"http://127.0.0.1:{OWN_PORT}/"}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "url")
    create(service, url=f"http://127.0.0.1:{OWN_PORT + 1}/")


def test_test_events_of_any_kind_reach_this_receiver_only(local: tuple[Service, Receiver]) -> None:
    service, receiver = local
    webhook = create(service, url=receiver.url("/tested"), events=["dataset.failed"])
    create(service, url=receiver.url("/other"))
    ids: dict[str, str] = {}
    for kind in KINDS:
        sent = service.call("POST", path_of(webhook, "/test"), json={"type": kind}).json()
        assert (sent["status"], sent["type"], sent["attempts"]) == ("pending", kind, 0)
        ids[kind] = sent["event_id"]
    arrived = {"status": "delivered", "limit": 100}
    service.until(lambda: len(deliveries(service, webhook, **arrived)) == len(KINDS))
    assert {one.path for one in receiver.received} == {"/tested"}
    for one in receiver.received:
        Verifier(webhook["secret"]).verify(one.body, one.headers)
    by_kind = {payload["type"]: payload for payload in payloads_of(receiver)}
    assert {kind: payload["id"] for kind, payload in by_kind.items()} == ids
    assert by_kind[KINDS[0]]["data"] == {
        "object": "webhook",
        "id": webhook["id"],
        "status": "active",
        "sequence": 1,
        "test": True,
    }


def payloads_of(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(one.body) for one in receiver.received]


def test_a_job_is_reported_from_its_queue_to_its_end(local: tuple[Service, Receiver]) -> None:
    service, receiver = local
    create(service, url=receiver.url(), events=["fine_tuning.job.*"])
    job_id = service.job()
    service.trainer().start_of(2)
    service.trainer().epoch(1)
    service.trainer().complete()
    service.until(lambda: len(receiver.received) == 4)
    payloads = payloads_of(receiver)
    by_sequence = {one["data"]["sequence"]: one for one in payloads}
    assert {number: one["type"].rpartition(".")[2] for number, one in by_sequence.items()} == {
        1: "queued",
        2: "started",
        3: "epoch_completed",
        4: "succeeded",
    }
    assert {one["data"]["id"] for one in payloads} == {job_id}
    assert by_sequence[4]["data"]["status"] == "completed"
    assert {len({one["id"] for one in payloads}), len(receiver.received)} == {4}


# Waits so long that the service retries nothing by itself during the test.
RARELY = DeliveryTiming(waits=(timedelta(), timedelta(hours=1)))


@pytest.mark.parametrize("local", [RARELY], indirect=True, ids=[""])
def test_a_failed_delivery_is_retried_on_request_under_the_same_id(
    local: tuple[Service, Receiver],
) -> None:
    service, receiver = local
    webhook = create(service, url=receiver.url())
    receiver.answers["/"] = answer(500)
    event_id = service.call("POST", path_of(webhook, "/test")).json()["event_id"]
    service.until(lambda: deliveries(service, webhook)[0]["attempts"] == 1)
    shown = deliveries(service, webhook)[0]
    assert (shown["status"], shown["response_status"]) == ("pending", 500)
    assert shown["next_attempt_at"] > shown["updated_at"]
    receiver.answers.clear()
    again = service.call("POST", path_of(webhook, f"/deliveries/{event_id}/retry"))
    assert (again.status_code, again.json()["attempts"]) == (200, 0)
    service.until(lambda: deliveries(service, webhook)[0]["status"] == "delivered")
    assert [one.headers["webhook-id"] for one in receiver.received] == [event_id] * 2


def test_a_replay_sends_what_its_status_and_times_name(service: Service) -> None:
    service.dataset()  # before the webhook exists, so its events have no receiver
    webhook = create(service, events=["dataset.*"])
    service.dataset()
    died, delivered = (one["event_id"] for one in deliveries(service, webhook))
    _settle(service, died, "dead")
    _settle(service, delivered, "delivered")

    def replayed(**asked: Any) -> int:
        answered = service.call("POST", path_of(webhook, "/replay"), json=asked)
        assert answered.status_code == 200, answered.text
        return answered.json()["replayed"]

    an_hour_ago = render_time(datetime.now(UTC) - timedelta(hours=1))
    assert replayed(until=an_hour_ago) == 0
    # Only the dead delivery is replayed by default.
    assert service.call("POST", path_of(webhook, "/replay")).json()["replayed"] == 1
    assert replayed() == 0
    assert replayed(status="delivered", since=an_hour_ago) == 1
    assert replayed(status="missing") == 2
    assert replayed(status="missing") == 0
    assert replayed(status="all") == 4
    assert {one["status"] for one in deliveries(service, webhook)} == {"pending"}
    assert len(deliveries(service, webhook, status="pending", limit=3)) == 3
    assert deliveries(service, webhook, status="dead") == []


def _settle(service: Service, event_id: str, status: str) -> None:
    with service.database.write() as connection:
        connection.execute(
            sa.update(tables.deliveries)
            .where(tables.deliveries.c.event_id == event_id)
            .values(status=status, next_attempt_at=None)
        )


def test_events_are_fetched_from_where_the_reader_stopped(service: Service) -> None:
    assert service.call("GET", "/v1/events").json() == {
        "events": [],
        "pagination": {"after": None},
    }
    service.dataset()
    service.dataset("bob")
    service.dataset()
    first = service.call("GET", "/v1/events?limit=3").json()
    assert [one["type"] for one in first["events"]] == [
        "dataset.uploaded",
        "dataset.processed",
        "dataset.uploaded",
    ]
    cursor = first["pagination"]["after"]
    rest = service.call("GET", "/v1/events", params={"after": cursor}).json()
    assert [one["type"] for one in rest["events"]] == ["dataset.processed"]
    end = rest["pagination"]["after"]
    none = service.call("GET", "/v1/events", params={"after": end}).json()
    assert none == {"events": [], "pagination": {"after": end}}
    theirs = service.call("GET", "/v1/events", "bob", params={"after": cursor})
    assert (theirs.status_code, theirs.json()["error"]["param"]) == (422, "after")
    service.clock.ahead += outbox.KEPT + timedelta(minutes=1)
    assert service.call("GET", "/v1/events").json()["events"] == []


def test_old_events_are_deleted_but_not_the_number_they_reached(service: Service) -> None:
    create(service)
    dataset = service.dataset()
    service.clock.ahead += outbox.KEPT + timedelta(minutes=1)
    with service.database.write() as connection:
        connection.execute(sa.update(tables.deliveries).values(next_attempt_at=None))
        outbox.forget(connection, service.clock())
        kept = connection.execute(sa.select(tables.events.c.type, tables.events.c.sequence)).all()
        assert kept == [("dataset.processed", 2)]
        assert connection.execute(sa.select(tables.deliveries)).all() == []
        row = {"id": dataset, "client_id": "alice"}
        outbox.emit(connection, "dataset.failed", row, service.clock())
    listed = service.call("GET", "/v1/events").json()["events"]
    assert [one["data"]["sequence"] for one in listed] == [3]


def test_the_client_speaks_for_all_of_it(local: tuple[Service, Receiver]) -> None:
    service, receiver = local
    webhooks, listed = service.client().webhooks, service.client().events

    async def story() -> None:
        created = await webhooks.create(WebhookCreate(url=receiver.url(), events=["dataset.*"]))
        assert (await webhooks.get(created.id)).url == receiver.url()
        assert [one.id for one in (await webhooks.list()).webhooks] == [created.id]
        changed = await webhooks.update(created.id, WebhookUpdate(description="d"))
        assert changed.description == "d"
        rotated = await webhooks.rotate_secret(created.id, SecretRotation(overlap_hours=0))
        assert rotated.secret != created.secret
        assert (await webhooks.replay(created.id, Replay(status="all"))).replayed == 0
        assert (await listed.list()).events == []
        assert (await webhooks.delete(created.id)).deleted

    service.run(story())
