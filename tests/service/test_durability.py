"""What is promised when requests cross, limits are reached, leases end and things fail in the middle."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.service.in_process import LINES, Service, jsonl, split
from tuneship.service.supervisor import Supervisor
from tuneship.store import rows, tables

Start = Callable[..., Service]


def together(service: Service, number: int, **request: Any) -> list[httpx.Response]:
    async def all_at_once() -> list[httpx.Response]:
        asks = [
            service.ask("POST", request["path"], json=one, headers=request.get("headers"))
            for one in request["bodies"](number)
        ]
        return await asyncio.gather(*asks)

    return service.run(all_at_once())


def job_body(service: Service) -> dict[str, Any]:
    return {"base_model": "tuneship-tiny", "dataset_id": service.dataset(), "model_name": "m"}


def test_sixty_four_creates_with_one_key_make_one_job(start: Start) -> None:
    service = start(maximum_active_jobs=64)
    body, headers = job_body(service), {"Idempotency-Key": "one"}
    answers = together(
        service, 64, path="/v1/fine-tuning/jobs", bodies=lambda n: [body] * n, headers=headers
    )
    made = {one.json()["id"] for one in answers if one.status_code == 201}
    assert len(made) == 1
    refused = [one for one in answers if one.status_code != 201]
    assert all(one.status_code == 409 for one in refused)
    assert all(one.headers["x-should-retry"] == "true" for one in refused)
    with service.database.read() as connection:
        assert rows.count(connection, tables.jobs) == 1
    again = service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (made.pop(), "true")
    assert again.headers["location"]


def test_a_key_belongs_to_its_tenant(service: Service) -> None:
    ids = {
        service.call(
            "POST",
            "/v1/deployments",
            tenant,
            json={"model_name": "tuneship-tiny", "deployment_name": "same"},
            headers={"Idempotency-Key": "one"},
        ).json()["id"]
        for tenant in ("alice", "bob")
    }
    assert len(ids) == 2


def test_a_refusal_gives_the_key_back(service: Service) -> None:
    body, headers = job_body(service), {"Idempotency-Key": "one"}
    path = "/v1/fine-tuning/jobs"
    wrong = service.call("POST", path, json={**body, "base_model": "no-such"}, headers=headers)
    right = service.call("POST", path, json=body, headers=headers)
    assert (wrong.status_code, right.status_code) == (404, 201)


def test_an_upload_is_repeated_with_another_boundary_and_makes_one_dataset(
    service: Service,
) -> None:
    made = {
        service.call(
            "POST",
            "/v1/datasets",
            data={"name": "d", "format": "instruction"},
            files={"file": ("x", jsonl(*LINES))},
            headers={"Idempotency-Key": "up", "Content-Type": f"multipart/form-data; boundary={b}"},
        ).json()["id"]
        for b in ("one", "two")
    }
    assert len(made) == 1


def test_a_slow_holder_of_a_key_makes_nothing_after_another_took_it(service: Service) -> None:
    body, headers = job_body(service), {"Idempotency-Key": "slow"}
    entered, go_on = threading.Event(), threading.Event()
    answers: list[httpx.Response] = []

    look_up = service.parts.catalogue.get  # the first thing a create does: no lock is held

    def slow_get(identifier: str) -> Any:
        if not entered.is_set():
            entered.set()
            go_on.wait(20)
        return look_up(identifier)

    service.parts.catalogue.get = slow_get  # type: ignore[method-assign]
    try:
        first = threading.Thread(
            target=lambda: answers.append(
                service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
            )
        )
        first.start()
        assert entered.wait(10)
        service.clock.ahead = timedelta(seconds=61)  # its lock has ended
        second = service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
        go_on.set()
        first.join()
    finally:
        del service.parts.catalogue.get  # type: ignore[attr-defined]
    assert second.status_code == 201
    assert answers[0].status_code == 409
    with service.database.read() as connection:
        assert rows.count(connection, tables.jobs) == 1


@pytest.mark.parametrize("number", [64])
def test_of_many_creates_at_the_quota_one_succeeds(start: Start, number: int) -> None:
    service = start(maximum_deployments=2)
    service.deployment("first")
    answers = together(
        service,
        number,
        path="/v1/deployments",
        bodies=lambda n: [
            {"model_name": "tuneship-tiny", "deployment_name": f"d{i}"} for i in range(n)
        ],
    )
    assert Counter(one.status_code for one in answers) == {201: 1, 429: number - 1}
    refused = next(one for one in answers if one.status_code == 429)
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers


def test_quotas_of_jobs_and_datasets_and_bytes_are_counted(start: Start) -> None:
    service = start(maximum_active_jobs=1, maximum_datasets=2, concurrent_jobs=1)
    body = job_body(service)
    codes = [service.call("POST", "/v1/fine-tuning/jobs", json=body).status_code for _ in range(2)]
    assert codes == [201, 429]
    service.dataset()
    files = {"file": ("x", jsonl(*LINES))}
    form = {"name": "d", "format": "instruction"}
    before = sorted((service.settings.data_dir / "blobs" / "datasets").iterdir())
    third = service.call("POST", "/v1/datasets", data=form, files=files)
    assert third.json()["error"]["code"] == "quota_exceeded"
    assert sorted((service.settings.data_dir / "blobs" / "datasets").iterdir()) == before
    tight = start(maximum_dataset_bytes=10)
    assert tight.call("POST", "/v1/datasets", data=form, files=files).status_code == 429


def test_the_rate_limit_is_exact_and_says_when_to_come_back(start: Start) -> None:
    service = start(control_requests_per_minute=5)
    answers = [service.call("GET", "/v1/models") for _ in range(8)]
    windows = {one.headers["x-ratelimit-reset"] for one in answers}  # a minute may end in between
    for window in windows:
        inside = [one for one in answers if one.headers["x-ratelimit-reset"] == window]
        assert [one.status_code for one in inside[:5]] == [200] * len(inside[:5])
        for one in inside[5:]:
            assert one.json()["error"]["code"] == "rate_limit_exceeded"
            assert one.headers["x-should-retry"] == "true"
            assert 1 <= int(one.headers["retry-after"]) <= 60
            assert one.headers["x-ratelimit-remaining"] == "0"


def test_failed_authentications_from_one_address_end_in_429(service: Service) -> None:
    async def knock() -> list[int]:
        async with httpx.AsyncClient(
            transport=service.transport(), base_url="http://service.test"
        ) as http:
            return [(await http.get("/v1/models")).status_code for _ in range(25)]

    codes = service.run(knock())
    assert codes[:20] == [401] * 20
    assert codes[-1] == 429


def test_a_full_disk_is_503_and_a_repeat_makes_one_job(service: Service) -> None:
    body = job_body(service) | {"tags": {f"k{i}": "v" * 512 for i in range(64)}}
    headers = {"Idempotency-Key": "full"}

    def limit(connection: Any, *_: Any) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

    service.run(
        stop(service)
    )  # the pool is exchanged: nobody else may hold a connection of the old one
    event.listen(service.database.engine, "connect", limit)
    service.database.engine.dispose()
    answer = service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
    event.remove(service.database.engine, "connect", limit)
    service.database.engine.dispose()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "internal_error")
    assert int(answer.headers["retry-after"]) >= 1
    again = service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
    assert again.status_code in (201, 409)
    with service.database.read() as connection:
        assert rows.count(connection, tables.jobs) == (again.status_code == 201)


def test_an_unexpected_failure_is_a_plain_500_with_its_traceback_only_in_the_log(
    service: Service,
) -> None:
    endpoint = service.canary("c", {service.deployment("d"): 100})

    def broken() -> int:
        raise RuntimeError("planted")

    service.draws = broken
    answer = service.call("POST", f"/v1/endpoints/{endpoint}/generate", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "true"
    assert "planted" not in answer.text
    identifier = answer.headers["x-request-id"]
    assert any("planted" in line and identifier in line for line in service.log.texts)


def test_a_lapsed_lease_reverts_before_any_later_request(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    service.run(stop(service))  # nobody but the requests themselves
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    endpoint = service.canary("c", {two: 100}, lease=lease)
    path = f"/v1/canary-endpoints/{endpoint}"
    assert generated_by(service, endpoint) == two
    service.clock.ahead = timedelta(seconds=60)
    assert generated_by(service, endpoint) == one
    shown = service.call("GET", path).json()
    assert (shown["version"], shown["lease"]) == (2, None)
    assert shown["deployments"] == split({one: 100})["deployments"]
    stale = service.call("PATCH", path, json=split({two: 100}), headers={"If-Match": '"1"'})
    assert stale.status_code == 412
    renewed = service.call("POST", f"{path}/lease", json={"seconds": 9})
    assert renewed.status_code == 409


async def stop(service: Service) -> None:
    service._running.cancel()
    await asyncio.sleep(0.05)


def generated_by(service: Service, endpoint: str, **headers: str) -> str:
    answer = service.call(
        "POST", f"/v1/endpoints/{endpoint}/generate", json={"prompt": "a"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["deployment_id"]


def test_the_supervisor_stores_the_reversion_with_its_event(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    endpoint = service.canary("c", {two: 100}, lease=lease)
    service.clock.ahead = timedelta(seconds=61)
    query = sa.select(tables.events.c.data).where(
        tables.events.c.type == "canary_endpoint.reverted", tables.events.c.resource_id == endpoint
    )

    def reverted() -> list[Any]:
        with service.database.read() as connection:
            return list(connection.scalars(query))

    service.until(lambda: bool(reverted()))
    assert [one["reason"] for one in reverted()] == ["lease_expired"]
    assert service.call("GET", f"/v1/canary-endpoints/{endpoint}").json()["version"] == 2


def test_a_renewed_lease_holds_and_an_ended_one_keeps_the_split(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    path = "/v1/canary-endpoints/" + service.canary("c", {two: 100}, lease=lease)
    service.clock.ahead = timedelta(seconds=50)
    renewed = service.call("POST", f"{path}/lease", json={"seconds": 60}).json()
    assert renewed["version"] == 1
    service.clock.ahead = timedelta(seconds=100)
    assert service.call("GET", path).json()["lease"] is not None
    ended = service.call("POST", f"{path}/lease", json={"seconds": 0}).json()
    assert (ended["lease"], ended["version"]) == (None, 2)
    service.clock.ahead = timedelta(days=1)
    assert service.call("GET", path).json()["deployments"] == split({two: 100})["deployments"]


def test_of_two_drivers_with_the_same_version_one_is_refused(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    path = "/v1/canary-endpoints/" + service.canary("c", {one: 100})

    async def both() -> list[httpx.Response]:
        return await asyncio.gather(
            *(
                service.ask("PATCH", path, json=split(shares), headers={"If-Match": '"1"'})
                for shares in ({one: 50, two: 50}, {one: 10, two: 90})
            )
        )

    answers = service.run(both())
    assert sorted(answer.status_code for answer in answers) == [200, 412]
    won = next(answer for answer in answers if answer.status_code == 200)
    assert service.call("GET", path).json()["deployments"] == won.json()["deployments"]


def test_a_routing_key_always_meets_the_same_deployment(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    endpoint = service.canary("c", {one: 50, two: 50})
    keys = {"X-Routing-Key": "patient-7"}
    assert len({generated_by(service, endpoint, **keys) for _ in range(8)}) == 1
    assert not any("patient-7" in line for line in service.log.texts)


def test_a_deployment_in_use_is_deleted_only_by_force(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    endpoint = service.canary("c", {one: 100, two: 0})
    refused = service.call("DELETE", f"/v1/deployments/{one}")
    assert refused.status_code == 409
    assert endpoint in refused.json()["error"]["message"]
    assert service.call("DELETE", f"/v1/deployments/{two}").status_code == 200
    path = f"/v1/canary-endpoints/{endpoint}"
    assert service.call("GET", path).json()["deployments"] == split({one: 100})["deployments"]
    assert service.call("DELETE", f"/v1/deployments/{one}?force=true").status_code == 200
    assert service.call("GET", path).json()["status"] == "inactive"
    answer = service.call("POST", f"/v1/endpoints/{endpoint}/generate", json={"prompt": "a"})
    assert answer.status_code == 409


def test_an_idle_member_leaves_the_fallback_too(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 60, "fallback": split({one: 100, two: 0})["deployments"]}
    path = "/v1/canary-endpoints/" + service.canary("c", {one: 100, two: 0}, lease=lease)
    service.call("DELETE", f"/v1/deployments/{two}")
    shown = service.call("GET", path).json()
    assert shown["lease"]["fallback"] == shown["deployments"] == split({one: 100})["deployments"]


def test_a_deleted_deployment_lets_its_generations_finish_and_then_unloads(
    service: Service,
) -> None:
    made = service.deployment("tuned", model_name=service.model())
    service.engines.may_answer.clear()
    answers: list[httpx.Response] = []
    path = f"/v1/deployments/{made}"
    asking = threading.Thread(
        target=lambda: answers.append(
            service.call("POST", f"{path}/generate", json={"prompt": "a"})
        )
    )
    asking.start()
    service.until(lambda: bool(service.engines.prompts))
    service.call("DELETE", path)
    late = service.call("POST", f"{path}/generate", json={"prompt": "a"})
    assert late.status_code == 409
    assert service.deployment_status(made) == "deleting"
    assert service.engines.replicas[0].adapters
    service.engines.may_answer.set()
    asking.join()
    assert answers[0].status_code == 200
    service.until(lambda: service.deployment_status(made) == "deleted")
    assert not service.engines.replicas[0].adapters


def test_a_forced_delete_ends_its_generations(service: Service) -> None:
    made = service.deployment("one")
    service.engines.may_answer.clear()
    answers: list[httpx.Response] = []
    path = f"/v1/deployments/{made}"
    asking = threading.Thread(
        target=lambda: answers.append(
            service.call("POST", f"{path}/generate", json={"prompt": "a"})
        )
    )
    asking.start()
    service.until(lambda: bool(service.engines.prompts))
    service.call("DELETE", f"{path}?force=true")
    service.until(lambda: service.deployment_status(made) == "deleted")
    asking.join()
    assert answers[0].status_code == 500


def test_metrics_count_every_request_that_has_ended(service: Service) -> None:
    made = service.deployment("one", tags={"fault.error_rate": "0.5", "fault.empty_rate": "0.5"})
    path = f"/v1/deployments/{made}"
    codes = [service.call("POST", f"{path}/generate", json={"prompt": "a"}) for _ in range(30)]
    service.call("POST", f"{path}/generate", json={"prompt": ""})  # the caller's own fault
    errors = sum(one.status_code == 500 for one in codes)
    empty = sum(one.status_code == 200 and not one.json()["completion"] for one in codes)
    got = service.call("GET", f"{path}/metrics").json()
    assert got["summary"]["error_rate"]["request_count"] == 30
    assert got["summary"]["error_rate"]["error_count"] == errors
    assert sum(got["metrics"]["token_usage"]["empty_count"]) == empty


def test_a_dead_replica_is_an_error_of_the_deployment_and_is_replaced(service: Service) -> None:
    made = service.deployment("one")
    path = f"/v1/deployments/{made}"
    service.engines.may_answer.clear()
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            service.call("POST", f"{path}/generate", json={"prompt": "a"})
        )
    )
    asking.start()
    service.until(lambda: bool(service.engines.prompts))
    service.engines.replicas[0].kill()
    asking.join()
    assert answers[0].status_code == 500
    service.engines.may_answer.set()
    again = service.call("POST", f"{path}/generate", json={"prompt": "a"})
    assert again.status_code == 200
    summary = service.call("GET", f"{path}/metrics").json()["summary"]["error_rate"]
    assert (summary["request_count"], summary["error_count"]) == (2, 1)


def test_fault_tags_do_nothing_without_permission(start: Start) -> None:
    service = start(allow_fault_injection=False)
    made = service.deployment("one", tags={"fault.error_rate": "1", "fault.delay_ms": "nonsense"})
    answer = service.call("POST", f"/v1/deployments/{made}/generate", json={"prompt": "a"})
    assert answer.status_code == 200


def test_a_cancelled_job_ends_cancelled_even_when_it_has_just_completed(service: Service) -> None:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(2)
    service.until(lambda: service.job_status(job_id) == "running")
    service.run(stop(service))
    service.call("POST", f"/v1/fine-tuning/jobs/{job_id}/cancel")
    trainer.complete()
    supervisor = Supervisor(service.parts, service.engines, service.supervisor._work, "next")
    service._running = asyncio.run_coroutine_threadsafe(supervisor.run(), service.loop)
    service.until(lambda: service.job_status(job_id) == "cancelled")
    with service.database.read() as connection:
        assert rows.count(connection, tables.models) == 0


def test_a_trainer_that_writes_nonsense_fails_its_job_alone(service: Service) -> None:
    bad, good = service.job(), service.job()
    first, second = service.trainer(0), service.trainer(1)
    (first.folder / "progress.jsonl").write_text('{"kind":"step"}\n')
    second.start_of(1)
    second.complete()
    by_folder = {one.folder.parent.name: one for one in (first, second)}
    assert set(by_folder) == {bad, good}
    statuses = {first.folder.parent.name: "failed", second.folder.parent.name: "completed"}
    service.until(lambda: all(service.job_status(one) == end for one, end in statuses.items()))


def test_three_attempts_without_progress_fail_the_job(service: Service) -> None:
    job_id = service.job()
    for number in range(3):
        service.trainer(number).code = 1
    service.until(lambda: service.job_status(job_id) == "failed")
    got = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()
    assert (got["error"]["code"], got["error"]["reason"]) == ("fine_tuning_error", "no_progress")
    assert "completed_at" not in got


def test_progress_resets_the_count_and_a_replay_overwrites_its_steps(service: Service) -> None:
    job_id = service.job()
    for number in range(4):
        trainer = service.trainer(number)
        trainer.start_of(9, resumed_from=number)
        for step in (number + 1, number + 2):
            trainer.step(step, loss=float(number))
        trainer.code = -9
    last = service.trainer(4)
    last.start_of(9, resumed_from=4)
    last.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    metrics = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}/metrics").json()
    assert metrics["steps"] == [1, 2, 3, 4, 5]
    assert metrics["training_loss"] == [0, 1, 2, 3, 3]
