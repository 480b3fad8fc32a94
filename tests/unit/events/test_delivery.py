"""Due events are delivered on schedule, signed, at least once, and independently for each receiver."""

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc
from standardwebhooks import Webhook

from tests.support.databases.sqlite_files import new_sqlite
from tests.support.fakes.webhook_receiver import Names, RecordingNetwork, answer, listening, opened
from tuneship.events import delivery
from tuneship.events.attempt import MAX_BODY_BYTES, DeliveryOutcome, Sender, default_trust
from tuneship.events.connector import Receivers
from tuneship.events.delivery import IN_FLIGHT, Deliverer, DeliveryTiming
from tuneship.events.signing import new_secret
from tuneship.security.vault import Vault
from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.database.identifiers import new_id
from tuneship.store.records import webhook_records
from tuneship.store.records.outbox import KEPT, emit, events_of, forget

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
TRUST = default_trust()


class Outbox:
    """A database with webhooks of one tenant, and a clock that moves only when a test moves it."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(new_sqlite(folder / "x.sqlite"))
        self.vault = Vault(b"k" * 32)
        self.began = datetime.now(UTC)
        self.ahead = timedelta()
        self.timeout_s = 15.0
        self.resource = {"id": new_id("ft"), "client_id": "alice", "status": "queued"}

    def now(self) -> datetime:
        return self.began + self.ahead

    def webhook(self, url: str, *subscriptions: str, **values: Any) -> tuple[str, str]:
        """Create a webhook. Return its id and its secret."""
        identifier, secret = new_id("wh"), new_secret()
        row = {
            "id": identifier,
            "client_id": "alice",
            "created_at": self.now(),
            "updated_at": self.now(),
            "tags": {},
            "url": url,
            "description": "",
            "events": list(subscriptions or ("*",)),
            "active": True,
            "secret": self.vault.seal(secret.encode(), identifier),
        }
        with self.database.write() as connection:
            connection.execute(sa.insert(tables.webhooks).values(**row | values))
        return identifier, secret

    def emit(self, kind: str = "fine_tuning.job.queued", **data: Any) -> None:
        with self.database.write() as connection:
            emit(connection, kind, self.resource, self.now(), **data)

    def rows(self, table: sa.Table = tables.deliveries) -> list[dict[str, Any]]:
        with self.database.read() as connection:
            return [dict(row) for row in connection.execute(sa.select(table)).mappings()]

    def only(self, table: sa.Table = tables.deliveries) -> dict[str, Any]:
        (row,) = self.rows(table)
        return row

    @asynccontextmanager
    async def delivering(self, timing: DeliveryTiming | None = None) -> AsyncIterator[Deliverer]:
        receivers = Receivers(opened("127.0.0.1", cidrs=LOOPBACK), Names({}))
        sender = Sender(receivers, RecordingNetwork(), TRUST, self.timeout_s)
        deliverer = Deliverer(self.database, self.vault, sender, self.now, lambda: 0.5, timing)
        task = asyncio.create_task(deliverer.run())
        try:
            yield deliverer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not holds():  # noqa: ASYNC110 - a database does not notify anybody of changed rows
                await asyncio.sleep(0.01)

    async def settled(self, status: str = "delivered") -> None:
        await self.until(lambda: {row["status"] for row in self.rows()} == {status})


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    opened_outbox = Outbox(tmp_path)
    yield opened_outbox
    opened_outbox.database.close()


def test_an_event_arrives_signed_with_everything_that_names_it(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            _, secret = outbox.webhook(receiver.url("/hook?a=b"))
            outbox.emit(epoch=1)
            await outbox.settled()
            (received,) = receiver.received
            Webhook(secret).verify(received.body, received.headers)
            event = outbox.only(tables.events)
            assert received.path == "/hook?a=b"
            assert received.headers["webhook-id"] == event["id"]
            assert received.headers["host"] == f"127.0.0.1:{receiver.port}"
            assert received.headers["content-type"] == "application/json"
            payload = json.loads(received.body)
            moment = payload.pop("timestamp")
            assert moment.endswith("Z")
            assert payload == {
                "id": event["id"],
                "type": "fine_tuning.job.queued",
                "created_at": moment,
                "data": {
                    "object": "fine_tuning.job",
                    "id": outbox.resource["id"],
                    "status": "queued",
                    "sequence": 1,
                    "epoch": 1,
                },
            }
        row = outbox.only()
        assert (row["attempts"], row["response_status"], row["failure"]) == (1, 204, None)

    asyncio.run(story())


def test_an_event_is_sent_when_it_is_committed_and_not_at_the_next_look(outbox: Outbox) -> None:
    async def story() -> None:
        timing = DeliveryTiming(look_every_s=3600)
        async with listening() as receiver, outbox.delivering(timing):
            outbox.webhook(receiver.url())
            for _ in range(3):
                outbox.emit()
                await outbox.settled()
            assert len(receiver.received) == 3

    asyncio.run(story())


def test_only_what_was_asked_for_is_addressed(outbox: Outbox) -> None:
    family, _ = outbox.webhook("https://a.test/", "fine_tuning.job.*")
    kind, _ = outbox.webhook("https://b.test/", "dataset.failed", "fine_tuning.job.failed")
    outbox.webhook("https://c.test/", "deployment.*")
    outbox.webhook("https://d.test/", active=False)
    outbox.webhook("https://e.test/", client_id="bob")
    outbox.emit("fine_tuning.job.queued")
    outbox.emit("fine_tuning.job.failed")
    addressed = sorted(row["webhook_id"] for row in outbox.rows())
    assert addressed == sorted([family, family, kind])


def test_an_event_and_its_deliveries_come_with_the_change_or_not_at_all(outbox: Outbox) -> None:
    outbox.webhook("https://a.test/")

    def broken() -> None:
        with outbox.database.write() as connection:
            emit(connection, "fine_tuning.job.queued", outbox.resource, outbox.now())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert outbox.rows() == outbox.rows(tables.events) == []


def test_a_kind_of_its_own_cannot_be_emitted(outbox: Outbox) -> None:
    with pytest.raises(ValueError, match="is not a valid EventKind"):
        outbox.emit("fine_tuning.job.paused")


def test_a_failure_is_tried_again_in_time_under_the_same_id(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = answer(500, body=b"secret text of the receiver")
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            row = outbox.only()
            assert (row["status"], row["response_status"]) == ("pending", 500)
            assert row["failure"] == "refused_by_receiver"
            assert row["next_attempt_at"] - row["updated_at"] == timedelta(seconds=5)
            assert outbox.only(tables.webhooks)["failing_since"] is not None
            receiver.answers.clear()
            outbox.ahead += timedelta(seconds=5)
            await outbox.settled()
            assert len({one.headers["webhook-id"] for one in receiver.received}) == 1
            assert len({one.headers["webhook-timestamp"] for one in receiver.received}) == 2
            assert len({one.body for one in receiver.received}) == 1
            assert outbox.only(tables.webhooks)["failing_since"] is None

    asyncio.run(story())


def test_after_ten_tries_it_is_dead_and_listed(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = answer(302, "Location: https://elsewhere.test/")
            outbox.emit()
            for attempt in range(1, 11):
                await outbox.until(lambda expected=attempt: outbox.only()["attempts"] == expected)
                row = outbox.only()
                if row["next_attempt_at"] is not None:
                    outbox.ahead = row["next_attempt_at"] - outbox.began
            assert (row["status"], row["failure"]) == ("dead", "redirected")
            assert row["next_attempt_at"] is None
            assert len(receiver.received) == 10

    asyncio.run(story())


def test_a_receiver_that_is_gone_is_never_called_again(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = answer(410)
            for _ in range(5):
                outbox.emit()
            await outbox.settled("dead")
            webhook = outbox.only(tables.webhooks)
            assert (webhook["active"], webhook["disabled_reason"]) == (False, "gone")
            assert len(receiver.received) <= IN_FLIGHT
            outbox.emit()
            assert len(outbox.rows()) == 5

    asyncio.run(story())


def test_five_days_of_failures_switch_a_webhook_off(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = answer(500)
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            outbox.ahead += webhook_records.SWITCH_OFF_AFTER - timedelta(minutes=1)
            await outbox.until(lambda: outbox.only()["attempts"] == 2)
            assert outbox.only(tables.webhooks)["active"]
            outbox.ahead += timedelta(hours=1)
            await outbox.settled("dead")
            webhook = outbox.only(tables.webhooks)
            assert (webhook["active"], webhook["disabled_reason"]) == (False, "failing")

    asyncio.run(story())


def test_a_try_that_fails_after_its_webhook_was_switched_off_is_the_last(outbox: Outbox) -> None:
    webhook_id, _ = outbox.webhook("https://a.test/")
    outbox.emit()
    with outbox.database.write() as connection:
        (webhook,) = webhook_records.webhooks_with_due(connection, outbox.now())
        (due,) = webhook_records.next_due(connection, webhook, outbox.now(), (), 2)
        webhook_records.switch_off(connection, webhook_id, None, outbox.now())
        later = outbox.now() + timedelta(hours=1)
        webhook_records.record_failure(connection, due, outbox.now(), later, failure="timed_out")
    row = outbox.only()
    assert (row["status"], row["next_attempt_at"], row["failure"]) == ("dead", None, "timed_out")


def test_retry_after_is_obeyed(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = answer(503, "Retry-After: 7200")
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            row = outbox.only()
            assert row["next_attempt_at"] - row["updated_at"] == timedelta(hours=2)

    asyncio.run(story())


def test_a_sick_receiver_gets_two_tries_at_a_time_and_delays_nobody(outbox: Outbox) -> None:
    async def story() -> None:
        outbox.timeout_s = 600
        async with listening() as receiver, outbox.delivering() as deliverer:
            sick, _ = outbox.webhook(receiver.url("/sick"))
            healthy, _ = outbox.webhook(receiver.url("/healthy"))
            receiver.answers["/sick"] = None
            for _ in range(20):
                outbox.emit()

            def arrived(path: str) -> int:
                return sum(one.path == path for one in receiver.received)

            await outbox.until(lambda: arrived("/sick") == IN_FLIGHT)
            await outbox.until(lambda: arrived("/healthy") == 20)
            assert arrived("/sick") == IN_FLIGHT
            assert len(deliverer._busy[sick]) == IN_FLIGHT
            await outbox.until(lambda: healthy not in deliverer._busy)
            for task in deliverer._tasks:
                task.cancel()

    asyncio.run(story())


def test_receivers_of_some_tenants_that_hang_hold_up_no_other_tenant(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "MAX_IN_FLIGHT", 4)

    async def story() -> None:
        outbox.timeout_s = 600
        async with listening() as receiver, outbox.delivering() as deliverer:
            receiver.answers["/sick"] = None
            for tenant in ("ann", "ben", "cem", "dan", "eve"):
                outbox.resource["client_id"] = tenant
                for _ in range(4):
                    outbox.webhook(receiver.url("/sick"), client_id=tenant)
                outbox.emit()
            await outbox.until(lambda: len(deliverer._busy) >= 5)
            # The first one has half of the places at most, and each of the others one, if need be beyond them.
            assert max(deliverer._tenants.values()) <= 2
            outbox.resource["client_id"] = "bob"
            outbox.webhook(receiver.url("/healthy"), client_id="bob")
            for _ in range(10):
                outbox.emit()
            await outbox.until(
                lambda: sum(one.path == "/healthy" for one in receiver.received) == 10
            )
            await outbox.until(lambda: "bob" not in +deliverer._tenants)
            for task in deliverer._tasks:
                task.cancel()

    asyncio.run(story())


def test_a_silent_receiver_is_left_after_the_time_limit(outbox: Outbox) -> None:
    async def story() -> None:
        outbox.timeout_s = 0.2
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = None
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            assert outbox.only()["failure"] == "timed_out"

    asyncio.run(story())


def test_the_status_counts_however_long_the_answer(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            receiver.answers["/"] = answer(200, body=b"x" * (MAX_BODY_BYTES * 20))
            outbox.emit()
            await outbox.settled()

    asyncio.run(story())


def test_a_delivery_in_flight_when_the_process_died_is_sent_again(outbox: Outbox) -> None:
    """The deliverer is cut off between sending and writing the result, as `kill -9` would do."""

    async def story() -> None:
        async with listening() as receiver:
            outbox.webhook(receiver.url())
            outbox.emit()
            async with outbox.delivering() as first:
                first._record = lambda due, outcome: asyncio.run(asyncio.sleep(0))  # type: ignore[method-assign]
                await outbox.until(lambda: len(receiver.received) >= 1)
            assert outbox.only()["status"] == "pending"
            async with outbox.delivering():
                await outbox.settled()
            assert len({one.headers["webhook-id"] for one in receiver.received}) == 1

    asyncio.run(story())


def test_at_shutdown_a_try_in_the_air_may_end(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver:
            outbox.webhook(receiver.url())
            receiver.is_silent = True
            outbox.emit()
            async with outbox.delivering(DeliveryTiming(drain_s=600.0)):
                await outbox.until(lambda: bool(receiver.received))
                # The answer comes only after the deliverer was asked to stop.
                asyncio.get_running_loop().call_later(0.1, receiver.speak.set)
            assert outbox.only()["status"] == "delivered"

    asyncio.run(story())


def test_a_rotation_signs_with_both_secrets_until_it_ends(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            identifier, secret = outbox.webhook(receiver.url())
            old = new_secret()
            with outbox.database.write() as connection:
                connection.execute(
                    sa.update(tables.webhooks).values(
                        previous_secret=outbox.vault.seal(old.encode(), identifier),
                        previous_until=outbox.now() + timedelta(hours=1),
                    )
                )
            outbox.emit()
            await outbox.settled()
            outbox.ahead += timedelta(hours=2)
            outbox.emit()
            await outbox.until(lambda: len(receiver.received) == 2)
            during, after = receiver.received
            assert len(during.headers["webhook-signature"].split()) == 2
            assert len(after.headers["webhook-signature"].split()) == 1
            Webhook(old).verify(during.body, during.headers)
            Webhook(secret).verify(during.body, during.headers)

    asyncio.run(story())


def test_a_secret_of_another_master_key_is_a_failed_try(outbox: Outbox) -> None:
    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(
                receiver.url(), secret=Vault(b"o" * 32).seal(new_secret().encode(), "wh")
            )
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            assert outbox.only()["failure"] == "secret_unreadable"
            assert receiver.received == []

    asyncio.run(story())


def test_an_address_that_may_not_be_called_is_a_failed_try(outbox: Outbox) -> None:
    async def story() -> None:
        async with outbox.delivering():
            outbox.webhook("https://169.254.169.254/")
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            assert outbox.only()["failure"] == "address_refused"

    asyncio.run(story())


def test_nobody_listening_is_a_failed_try(outbox: Outbox) -> None:
    async def story() -> None:
        with socket.socket() as silent:
            # Nobody else can get this port, and nobody listens on it.
            silent.bind(("127.0.0.1", 0))
            async with outbox.delivering():
                outbox.webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/")
                outbox.emit()
                await outbox.until(lambda: outbox.only()["attempts"] == 1)
                assert outbox.only()["failure"] == "connection_failed"

    asyncio.run(story())


def test_sequences_have_no_gap_and_outlive_the_events(outbox: Outbox) -> None:
    for _ in range(3):
        outbox.emit()
    outbox.ahead += KEPT + timedelta(days=1)
    with outbox.database.write() as connection:
        forget(connection, outbox.now())
    assert outbox.only(tables.events)["sequence"] == 3
    with outbox.database.read() as connection:
        assert events_of(connection, "alice", outbox.now(), after=0, limit=10) == []
    outbox.emit()
    assert sorted(row["sequence"] for row in outbox.rows(tables.events)) == [3, 4]


def test_forgetting_spares_what_still_waits(outbox: Outbox) -> None:
    outbox.webhook("https://a.test/")
    outbox.emit()
    outbox.emit()
    with outbox.database.write() as connection:
        connection.execute(
            sa.update(tables.deliveries)
            .where(tables.deliveries.c.event_id == outbox.rows(tables.events)[1]["id"])
            .values(next_attempt_at=None, status="dead")
        )
    outbox.ahead += KEPT + timedelta(days=1)
    with outbox.database.write() as connection:
        forget(connection, outbox.now())
    assert [row["status"] for row in outbox.rows()] == ["pending"]
    assert [row["sequence"] for row in outbox.rows(tables.events)] == [1, 2]


def test_in_hipaa_mode_an_event_tells_no_names_and_no_messages(outbox: Outbox) -> None:
    outbox.resource |= {"security_settings": {"compliance_mode": "hipaa"}}
    outbox.emit(
        status="failed", message="a patient's name", fine_tuned_model="ft:x:name:1", epoch=2
    )
    assert outbox.only(tables.events)["data"] == {"status": "failed", "epoch": 2}


def test_an_event_stays_small(outbox: Outbox) -> None:
    outbox.emit(message="x" * 100_000)
    assert len(json.dumps(outbox.only(tables.events)["data"])) < 20_000


def test_tls_asks_for_the_name_and_believes_only_known_authorities(
    outbox: Outbox, certificate: tuple[Path, Path]
) -> None:
    key, chain = certificate
    server, own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(chain, key)
    own.load_verify_locations(chain)

    async def story(trust: ssl.SSLContext, host: str) -> tuple[DeliveryOutcome, list[str | None]]:
        names = Names({"receiver.test": [["127.0.0.1"]], "other.test": [["127.0.0.1"]]})
        async with listening(server) as receiver:
            network = RecordingNetwork()
            sender = Sender(Receivers(opened(cidrs=LOOPBACK), names), network, trust)
            url = receiver.url("/hook", host, "https")
            outcome = await sender.send(url, {}, b"{}", outbox.now())
            assert network.connected == ["127.0.0.1"]
            hosts = [one.headers["host"] for one in receiver.received]
            assert hosts == [f"{host}:{receiver.port}"] * (outcome.failure is None)
            return outcome, receiver.server_names

    assert asyncio.run(story(own, "receiver.test")) == (
        DeliveryOutcome(None, 204),
        ["receiver.test"],
    )
    assert asyncio.run(story(own, "other.test")) == (DeliveryOutcome("tls_failed"), ["other.test"])
    assert asyncio.run(story(TRUST, "receiver.test"))[0] == DeliveryOutcome("tls_failed")


def test_an_outcome_that_cannot_be_recorded_is_recorded_later_without_another_call(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = DeliveryTiming(record_again_s=0.001)
    really, refused = webhook_records.record_success, list[str]()

    def delivered(connection: sa.Connection, due: Any, *arguments: Any) -> None:
        if len(refused) < 5:
            refused.append(due.key[1])
            raise exc.OperationalError("update", {}, Exception("disk full"))
        really(connection, due, *arguments)

    monkeypatch.setattr(webhook_records, "record_success", delivered)

    async def story() -> None:
        async with listening() as receiver, outbox.delivering(at_once):
            outbox.webhook(receiver.url())
            outbox.emit()
            await outbox.settled()
            assert len(receiver.received) == 1

    asyncio.run(story())
    assert len(refused) == 5


def test_a_failure_of_ours_is_a_failed_try_and_not_made_again_at_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(delivery, "event", broken)

    async def story() -> None:
        async with listening() as receiver, outbox.delivering():
            outbox.webhook(receiver.url())
            outbox.emit()
            await outbox.until(lambda: outbox.only()["attempts"] == 1)
            assert outbox.only()["failure"] == "internal_error"
            assert receiver.received == []

    asyncio.run(story())
