"""A batch from restart to restart, up to its time limit, beside others, and with what fails."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

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
from tests.unit.gates.rollouts import plan_with
from tuneship.gates.gate_types import LatencyLimits
from tuneship.gates.kinds import GATES, Measured
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.readings import limits_of
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.service.batches import input_lines
from tuneship.store.database import tables

pytestmark = pytest.mark.both_databases

NAMES = [f"request {number}" for number in range(12)]


def requests(service: Service, *names: str, **body: Any) -> list[dict[str, Any]]:
    deployment = service.deployment("answers")
    return [request(name, deployment, **body) for name in names]


def retry_at_once(service: Service, times: int) -> None:
    """Have batches that begin from now on retry a request so often, without a pause."""
    batches = service.supervisor.leader_work.batches
    batches.timing = replace(batches.timing, retry_after_s=(0.0,) * times)


@pytest.mark.parametrize(("timing", "stored"), [(AT_ONCE, 7), (AT_THE_END, 0)])
def test_after_a_restart_only_what_was_not_stored_is_asked_again(
    tmp_path: Path, database_settings: DatabaseSettings, timing: BackgroundTiming, stored: int
) -> None:
    options = database_settings()
    with Service(tmp_path / "data", **options) as first:
        first.supervisor.leader_work.batches.timing = timing
        lines = requests(first, *NAMES)
        first.spare = permits(7)
        made = batch(first, *lines)
        first.until(lambda: len(first.engines.prompts) == 7)
        first.until(lambda: shown(first, made)["request_counts"]["completed"] == stored)
        first.halt()
    with Service(tmp_path / "data", **options) as second:
        done = ended(second, made)
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert names_of(second, done["output_file_id"]) == NAMES
        assert len(second.engines.prompts) == 12 - stored
        _check_files(second, done)


def _check_files(service: Service, done: dict[str, Any]) -> None:
    """Check that no part of the batch is left: the rows, keys and blobs are those of its files."""
    ids = [done[name] for name in ("input_file_id", "output_file_id", "error_file_id")]
    expected = {one.replace("file-", "file_") for one in ids if one is not None}
    with service.database.read() as connection:
        assert set(connection.scalars(sa.select(tables.batch_files.c.id))) == expected
        keys = sa.select(tables.object_keys.c.object_id)
        kept = connection.scalars(keys.where(tables.object_keys.c.object_id.startswith("files/")))
        assert {one.removeprefix("files/") for one in kept} == expected
    folder = service.settings.data_dir / "blobs" / "files"
    service.until(lambda: {one.name for one in folder.iterdir()} == expected)


def test_at_its_time_limit_the_rest_of_a_batch_expires(service: Service) -> None:
    service.supervisor.leader_work.batches.timing = AT_ONCE
    lines = requests(service, *NAMES)
    service.spare = permits(3)
    made = batch(service, *lines)
    service.until(lambda: shown(service, made)["request_counts"]["completed"] == 3)
    # The clock jumps, so nothing is deleted by age: the files of this test would all be a day old.
    service.clock.jumped = timedelta(hours=25)
    done = ended(service, made)
    assert done["status"] == "expired"
    assert done["expired_at"] >= done["expires_at"]
    assert done["request_counts"] == {"total": 12, "completed": 3, "failed": 9}
    assert names_of(service, done["output_file_id"]) == NAMES[:3]
    errors = lines_of(service, done["error_file_id"])
    assert [one["custom_id"] for one in errors] == NAMES[3:]
    assert {(one["response"], one["error"]["code"]) for one in errors} == {(None, "batch_expired")}
    _check_files(service, done)


def test_a_batch_that_is_cancelled_while_the_service_is_away_ends_after_it(
    tmp_path: Path, database_settings: DatabaseSettings
) -> None:
    options = database_settings()
    with Service(tmp_path / "data", **options) as first:
        lines = requests(first, *NAMES)
        first.rest()  # nothing looks at the batch
        made = batch(first, *lines)
        assert call(first, "POST", f"batches/{made}/cancel").json()["status"] == "cancelling"
    with Service(tmp_path / "data", **options) as second:
        done = ended(second, made)
        assert done["status"] == "cancelled"
        assert done["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert (done["output_file_id"], done["error_file_id"]) == (None, None)


def test_a_temporary_error_is_retried_and_a_lasting_one_is_the_answer(service: Service) -> None:
    lines = requests(service, "a")
    retry_at_once(service, 1000)
    service.engines.error = {"error": "no"}
    made = batch(service, *lines)
    service.until(lambda: len(service.engines.prompts) > 3)
    service.engines.error = None
    assert ended(service, made)["request_counts"]["completed"] == 1

    retry_at_once(service, 2)
    service.engines.error, before = {"error": "no"}, len(service.engines.prompts)
    done = ended(service, batch(service, *lines))
    assert len(service.engines.prompts) - before == 3
    (line,) = lines_of(service, done["error_file_id"])
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["code"] == "server_error"


def test_a_batch_whose_file_cannot_be_read_fails_for_its_owner(service: Service) -> None:
    file_id = upload(service, requests(service, "a"))
    folder = service.settings.data_dir / "blobs" / "files" / file_id.replace("file-", "file_")
    (folder / "data.jsonl").unlink()
    made = batch(service, file_id=file_id)
    service.until(lambda: _failures(service, 1))
    for number in range(2, 6):
        service.clock.ahead += timedelta(minutes=1)  # the pause before the next try
        service.until(lambda number=number: _failures(service, number))
    done = ended(service, made)
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["code"] == "server_error"
    assert str(folder) not in str(done)


def _failures(service: Service, number: int) -> bool:
    lines = [text for text in service.log.texts if "a batch could not be worked on" in text]
    return len(lines) >= number


def test_batches_of_two_tenants_go_on_side_by_side(service: Service) -> None:
    lines = requests(service, *NAMES)
    deployment = service.deployment("theirs", "bob")
    theirs = [request(name, deployment) for name in NAMES]
    service.engines.may_answer.clear()
    made = [batch(service, *lines), batch(service, *theirs, client="bob")]
    # Each has a request in flight, although neither has an answer yet.
    service.until(lambda: len(service.engines.asked) == 2)
    assert len({frame["owner"] for frame in service.engines.asked}) == 2
    service.engines.may_answer.set()
    for one, client in zip(made, ("alice", "bob"), strict=True):
        assert ended(service, one, client)["status"] == "completed"
    assert all(frame["is_background"] for frame in service.engines.asked)


def test_while_somebody_waits_a_batch_has_one_request_in_flight(service: Service) -> None:
    lines = requests(service, *(f"{number}" for number in range(8)))
    in_flight: list[int] = []

    def note(_client: str) -> bool:
        in_flight.append(service.parts.in_flight.total())
        return True

    service.spare = note
    # Somebody waits for as long as this block, and is the only one whenever a request of the batch begins.
    with service.parts.in_flight.track(lines[0]["body"]["model"]):
        assert ended(service, batch(service, *lines))["request_counts"]["completed"] == 8
    assert in_flight == [1] * 8


def test_metrics_and_gates_see_the_answers_of_a_batch_and_not_their_time(
    service: Service,
) -> None:
    candidate, baseline = service.deployment("candidate"), service.deployment("baseline")
    service.engines.answer = [service.parts.catalogue.default.tokenizer.encode(" ").ids[0]]
    ended(service, batch(service, *(request(f"{number}", candidate) for number in range(8))))
    service.clock.ahead += timedelta(minutes=2)  # the minute of the requests is complete
    answers = {
        arm: service.call("GET", f"/v1/deployments/{one}/metrics?interval=1m").json()
        for arm, one in (("candidate", candidate), ("baseline", baseline))
    }
    metrics, summary = answers["candidate"]["metrics"], answers["candidate"]["summary"]
    assert sum(metrics["error_rate"]["request_count"]) == 8
    assert sum(metrics["token_usage"]["empty_count"]) == 8
    assert summary["token_usage"]["input"] > 0
    latency = metrics["latency"]
    for name in ("average", "p50", "p95", "p99"):
        assert summary["latency"][name] is None
        assert set(latency[name]) == {None}
    assert {tuple(counts) for counts in latency["histogram"]["counts"]} == {(0,) * 19}

    series = read_series(answers["baseline"], answers["candidate"], "1m")
    limits = LatencyLimits(1e-6, 1e-6, 1e-6, requests=200)
    edges = (series.edges_ms["baseline"], series.edges_ms["candidate"])
    plan, of_candidate = plan_with(), dict[str, tuple[int, int]]()
    for name in ("slow", "very_slow", "error", "empty"):
        kind, of_gate = GATES[name], limits_of(plan, name)
        assert kind.count is not None
        assert of_gate is not None
        counted = [kind.count(Measured(one, edges, limits), of_gate) for one in series.buckets]
        of_candidate[name] = (sum(one.n_c for one in counted), sum(one.x_c for one in counted))
    assert of_candidate["slow"] == of_candidate["very_slow"] == (0, 0)
    assert (of_candidate["error"], of_candidate["empty"]) == ((8, 0), (8, 8))


def test_requests_of_a_cancelled_batch_are_nobody_who_gave_up(service: Service) -> None:
    deployment = service.deployment("answers")
    service.engines.may_answer.clear()
    made = batch(service, request("a", deployment))
    service.until(lambda: len(service.engines.asked) == 1)
    ages = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()["in_flight"]
    assert ages["requests"] == 0
    assert service.parts.in_flight.accepted(deployment) == 1
    assert call(service, "POST", f"batches/{made}/cancel").status_code == 200
    assert ended(service, made)["status"] == "cancelled"
    service.engines.may_answer.set()
    assert _counts(service, deployment) == (0, 0, 0)


def test_a_request_whose_turn_did_not_come_in_time_is_no_error_and_asked_again(
    start: Callable[..., Service],
) -> None:
    service = start(generate_timeout_s=0.2)
    retry_at_once(service, 1000)
    deployment = service.deployment("answers")
    service.engines.may_answer.clear()
    made = batch(service, request("a", deployment))
    service.until(lambda: len(service.engines.asked) > 1)
    service.engines.may_answer.set()
    assert ended(service, made)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert _counts(service, deployment) == (1, 0, 0)


def _counts(service: Service, deployment: str) -> tuple[int, int, int]:
    """Requests, errors and cancelled requests of a deployment."""
    answer = service.call("GET", f"/v1/deployments/{deployment}/metrics").json()
    rates = answer["metrics"]["error_rate"]
    names = ("request_count", "error_count", "cancelled_count")
    requests, errors, cancelled = (sum(rates[name]) for name in names)
    return requests, errors, cancelled


def test_a_tenant_has_so_many_open_batches_and_no_more(
    start: Callable[..., Service],
) -> None:
    service = start(maximum_active_batches=2)
    file_id = upload(service, requests(service, "a"))
    service.spare = permits(0)
    for _ in range(2):
        batch(service, file_id=file_id)
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    refused = call(service, "POST", "batches", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


def test_bodies_are_checked_once_and_not_on_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    check = input_lines.checked_body

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return check(*arguments)

    monkeypatch.setattr(input_lines, "checked_body", noted)
    retry_at_once(service, 1000)
    service.engines.error = {"error": "no"}
    made = batch(service, *requests(service, *NAMES))
    service.until(lambda: len(service.engines.prompts) > 3)
    service.engines.error = None
    assert ended(service, made)["request_counts"]["completed"] == len(NAMES)
    assert len(threads) == len(NAMES)
    assert all(name.startswith("batch work") for name in threads)


@pytest.mark.parametrize("setting", ["maximum_datasets", "maximum_dataset_bytes"])
def test_files_of_batches_count_against_the_tenants_room(
    start: Callable[..., Service], setting: str
) -> None:
    service = start(**{setting: 1 if setting == "maximum_datasets" else 400})
    upload(service, [request("a", "m")])
    form, files = {"purpose": "batch"}, {"file": ("night.jsonl", b"x" * 300)}
    refused = call(service, "POST", "files", data=form, files=files)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert len(list((service.settings.data_dir / "blobs" / "files").iterdir())) == 1


def test_a_request_that_is_repeated_by_the_client_makes_one_batch(service: Service) -> None:
    file_id = upload(service, requests(service, "a"))
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = [
        call(
            service, "POST", "batches", json=body, headers={"x-stainless-retry-count": f"{count}"}
        ).json()["id"]
        for count in (0, 1)
    ]
    assert made[0] == made[1]
    assert ended(service, made[0])["status"] == "completed"
