"""Which batches are worked on, and how those end whose key has ended, or whose tenant has no room for their answers."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.openai.batches import (
    AT_ONCE,
    AT_THE_END,
    batch,
    call,
    ended,
    lines_of,
    names_of,
    permits,
    request,
    shown,
    upload,
)
from tests.support.service.in_process import Service
from tests.support.service.service_fixtures import DatabaseSettings
from tuneship.host.disk_space import DiskNearlyFull
from tuneship.service.background_requests import background_run
from tuneship.service.background_requests.background_keeper import to_start
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.service.batches import stored_answers
from tuneship.service.batches.stored_answers import BatchStore
from tuneship.store.database import tables

both_databases = pytest.mark.both_databases
NAMES = [f"request {number}" for number in range(12)]


def row(name: str, client: str) -> Any:
    return {"id": name, "client_id": client}


@pytest.mark.parametrize(
    ("waiting", "running", "started"),
    [
        pytest.param("a1 a2 b1", {}, "a1 b1 a2", id="every first before any second"),
        pytest.param("a2 a3 b1 b2", {"a": 1}, "b1 a2 b2", id="two for each"),
        pytest.param(
            "a2 e1 e2 f1", dict.fromkeys("abcd", 2), "e1 f1", id="beyond the places of all"
        ),
        pytest.param("a1 b1 c1", dict.fromkeys("defghijk", 1), "a1 b1 c1", id="more than places"),
        pytest.param("a2 b2", dict.fromkeys("abcdefg", 1), "a2", id="a second in the last place"),
    ],
)
def test_each_tenant_has_a_batch_at_work_before_another_has_two(
    waiting: str, running: dict[str, int], started: str
) -> None:
    batches = [row(name, name[0]) for name in waiting.split()]
    assert [one["id"] for one in to_start(batches, running)] == started.split()


def held_back(service: Service, client: str, count: int) -> list[str]:
    """Batches of a tenant whose requests never get their turn."""
    service.headers.setdefault(client, service.key_headers(client))
    deployment = service.deployment("answers", client)
    file_id = upload(service, [request("a", deployment)], client)
    return [batch(service, client=client, file_id=file_id) for _ in range(count)]


@both_databases
def test_a_tenant_gets_in_however_many_batches_of_others_are_at_work(
    tmp_path: Path, database_settings: DatabaseSettings
) -> None:
    options, others = database_settings(), ["ann", "ben", "cem", "dan"]
    with Service(tmp_path / "data", **options) as first:
        first.spare = lambda client: client not in others
        made = [one for client in others for one in held_back(first, client, 2)]
        keeper = first.supervisor.leader_work.batches
        first.until(lambda: set(keeper._runs) == set(made))
        lines = [request("a", first.deployment("answers"))]
        assert ended(first, batch(first, *lines))["status"] == "completed"
        waiting = batch(first, client="ann", file_id=shown(first, made[0], "ann")["input_file_id"])
        first.halt()
    # Nor does a restart, after which the oldest are found first.
    with Service(tmp_path / "data", **options) as second:
        second.spare = lambda client: client not in others
        keeper = second.supervisor.leader_work.batches
        second.until(lambda: set(keeper._runs) == set(made))
        assert ended(second, batch(second, *lines))["status"] == "completed"
        assert set(keeper._runs) == set(made)
        assert waiting not in keeper._runs


# Keys that end


def revoke(service: Service, client: str = "alice") -> None:
    """Revoke the key that a tenant uses, as another process would, and give it another one."""
    service.keys.revoke(service.headers[client]["Authorization"][11:19])
    service.headers[client] = service.key_headers(client)


@both_databases
@pytest.mark.parametrize("is_expired", [False, True])
def test_a_batch_ends_with_its_key_and_keeps_what_was_answered(
    service: Service, is_expired: bool
) -> None:
    if is_expired:
        service.headers["alice"] = service.key_headers("alice", lifetime=timedelta(hours=1))
    service.supervisor.leader_work.batches.timing = AT_ONCE
    deployment = service.deployment("answers")
    service.spare = permits(4)
    made = batch(service, *(request(name, deployment) for name in NAMES))
    service.until(lambda: shown(service, made)["request_counts"]["completed"] == 4)
    # One request is in flight when the key ends.
    service.engines.may_answer.clear()
    service.spare = permits(1)
    service.until(lambda: bool(service.engines.replicas[0].running))
    if is_expired:
        service.clock.ahead += timedelta(hours=1)
        service.headers["alice"] = service.key_headers("alice")
    else:
        revoke(service)
    service.until(lambda: not service.engines.replicas[0].running)
    service.engines.may_answer.set()

    done = ended(service, made)
    assert done["status"] == "cancelled"
    (error,) = done["errors"]["data"]
    assert error["code"] == "key_ended"
    assert "revoked or has expired" in error["message"]
    assert done["request_counts"] == {"total": 12, "completed": 4, "failed": 8}
    assert names_of(service, done["output_file_id"]) == NAMES[:4]
    errors = lines_of(service, done["error_file_id"])
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert len(service.engines.prompts) == 5


def test_a_batch_whose_key_ended_while_the_service_was_away_asks_nothing(
    tmp_path: Path, database_settings: DatabaseSettings
) -> None:
    options = database_settings()
    with Service(tmp_path / "data", **options) as first:
        deployment = first.deployment("answers")
        first.spare = permits(0)
        made = batch(first, request("a", deployment))
        first.until(lambda: shown(first, made)["status"] == "in_progress")
        first.halt()
        revoke(first)
    with Service(tmp_path / "data", **options) as second:
        done = ended(second, made)
        assert done["status"] == "cancelled"
        assert second.engines.prompts == []


def test_a_batch_that_waits_behind_others_ends_with_its_key_too(service: Service) -> None:
    service.spare = permits(0)
    others = held_back(service, "alice", 2)
    keeper = service.supervisor.leader_work.batches
    service.until(lambda: set(keeper._runs) == set(others))
    mine = service.headers["alice"]
    service.headers["alice"] = service.key_headers("alice")
    waiting = batch(service, file_id=shown(service, others[0])["input_file_id"])
    assert shown(service, waiting)["status"] == "validating"
    revoke(service)
    done = ended(service, waiting)
    assert (done["status"], done["errors"]["data"][0]["code"]) == ("cancelled", "key_ended")
    service.headers["alice"] = mine
    assert {shown(service, one)["status"] for one in others} == {"in_progress"}


# Room for answers


def bytes_kept(service: Service) -> int:
    """All bytes of Alice's files."""
    with service.database.read() as connection:
        return sum(
            row.bytes
            for table in (tables.datasets, tables.batch_files)
            for row in connection.execute(table.select().where(table.c.client_id == "alice"))
        )


@both_databases
@pytest.mark.parametrize("timing", [AT_ONCE, AT_THE_END])
def test_a_batch_whose_answers_are_too_many_bytes_fails_and_keeps_what_fits(
    start: Callable[..., Service], timing: BackgroundTiming
) -> None:
    service = start(maximum_dataset_bytes=6000)
    service.supervisor.leader_work.batches.timing = timing
    deployment = service.deployment("answers")
    done = ended(service, batch(service, *(request(name, deployment) for name in NAMES)))
    assert done["status"] == "failed"
    (error,) = done["errors"]["data"]
    assert error["code"] == "insufficient_quota"
    kept = done["request_counts"]["completed"]
    assert 0 < kept < len(NAMES)
    assert f"the first {kept} requests" in error["message"]
    assert names_of(service, done["output_file_id"]) == NAMES[:kept]
    assert 5000 < bytes_kept(service) <= 6000
    assert call(service, "DELETE", f"files/{done['output_file_id']}").status_code == 200
    rest = [request(name, deployment) for name in NAMES[kept : kept + 1]]
    assert ended(service, batch(service, *rest))["status"] == "completed"


def test_answers_for_which_an_upload_took_the_room_meanwhile_are_not_kept(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(maximum_dataset_bytes=6000)
    deployment, big = service.deployment("answers"), b"x" * 5000
    keep = BatchStore._store_fitting

    def late(*arguments: Any) -> Any:
        form, files = {"purpose": "batch"}, {"file": ("big.jsonl", big)}
        assert call(service, "POST", "files", data=form, files=files).status_code == 200
        return keep(*arguments)

    monkeypatch.setattr(BatchStore, "_store_fitting", late)
    service.supervisor.leader_work.batches.timing = AT_THE_END
    done = ended(service, batch(service, request("a", deployment), request("b", deployment)))
    assert (done["status"], done["output_file_id"]) == ("failed", None)
    assert bytes_kept(service) <= 6000
    assert len(list((service.settings.data_dir / "blobs" / "files").iterdir())) == 2


def test_a_tenant_without_room_begins_no_batch(start: Callable[..., Service]) -> None:
    line = request("a", "m")
    service = start(maximum_dataset_bytes=200)
    file_id = upload(service, [line])
    service.settings.maximum_dataset_bytes = bytes_kept(service)
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    refused = call(service, "POST", "batches", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


def test_a_batch_waits_while_the_disk_has_no_room_and_asks_nothing_meanwhile(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_run, "ROOM_PAUSE_S", 0.3)
    service.supervisor.leader_work.batches.timing = AT_ONCE
    deployment, floor = service.deployment("answers"), service.settings.minimum_free_disk_bytes
    lines = [request(name, deployment) for name in NAMES]
    made = batch(service, *lines)
    file_id = shown(service, made)["input_file_id"]
    ended(service, made)
    before = bytes_kept(service)

    service.settings.minimum_free_disk_bytes = 1 << 60
    made = batch(service, file_id=file_id)
    service.until(lambda: _waits(service, 3))
    assert len(service.engines.prompts) < 2 * len(NAMES) + 256
    assert bytes_kept(service) == before
    assert shown(service, made)["request_counts"]["completed"] == 0
    service.settings.minimum_free_disk_bytes = floor
    done = ended(service, made)
    assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}


def _waits(service: Service, number: int) -> bool:
    lines = [text for text in service.log.texts if "answers wait for room on the disk" in text]
    return len(lines) >= number


def test_a_batch_is_not_given_up_while_its_files_have_no_room(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def without_room(settings: Any, more_bytes: int) -> None:
        asked.append(more_bytes)
        if 1 < len(asked) < 9:  # the first one is for the answer itself
            raise DiskNearlyFull

    monkeypatch.setattr(stored_answers, "check_room", without_room)
    service.supervisor.leader_work.batches.timing = AT_THE_END
    made = batch(service, request("a", service.deployment("answers")))
    for number in range(2, 9):
        service.until(lambda number=number: len(asked) >= number)
        service.clock.ahead += timedelta(minutes=1)  # the pause before the next try
    done = ended(service, made)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 1)
    assert names_of(service, done["output_file_id"]) == ["a"]
    assert asked[0] == 2 * asked[-1]


def test_long_answers_behind_a_slow_one_are_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_run, "HELD_AT_MOST_BYTES", 1)
    deployment = service.deployment("answers")
    names = [f"{number}" for number in range(40)]
    done = ended(service, batch(service, *(request(name, deployment) for name in names)))
    assert names_of(service, done["output_file_id"]) == names
