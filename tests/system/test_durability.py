"""Promises hold when requests cross, limits are reached, leases end and operations fail half-way."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.engines import PlayedTrainer
from tests.support.service.in_process import Service, split
from tuneship.service.context.timing import ServiceTiming
from tuneship.service.endpoints.lease_keeper import RENEW_EVERY
from tuneship.store.database import rows, tables
from tuneship.store.records import metric_windows
from tuneship.store.records.job_leases import LEASE

Start = Callable[..., Service]
pytestmark = pytest.mark.both_databases


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


def test_a_row_that_cannot_be_shown_is_a_plain_500_too(service: Service) -> None:
    job_id = service.job()
    kept = sa.select(tables.jobs.c.tags).where(tables.jobs.c.id == job_id)
    with service.database.write() as connection:
        before = connection.scalar(kept)
        connection.execute(sa.update(tables.jobs).values(tags=["planted"]))
    answer = service.call("GET", "/v1/fine-tuning/jobs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "true"
    # The request id is random and could contain one of the words.
    text = answer.text.replace(answer.headers["x-request-id"], "")
    for leak in ("planted", "pydantic", "tags", "Traceback", str(service.settings.data_dir)):
        assert leak not in text
    with service.database.write() as connection:
        connection.execute(sa.update(tables.jobs).values(tags=before))
    assert service.call("GET", "/v1/fine-tuning/jobs").status_code == 200


def test_a_lapsed_lease_reverts_before_any_later_request(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    service.rest()  # without background work, so that the requests alone revert it
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


def test_metrics_that_cannot_be_stored_keep_no_lease_and_no_job_waiting(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    endpoint = service.canary("c", {two: 100}, lease=lease)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(metric_windows, "store", broken)
    assert generated_by(service, endpoint) == two
    service.until(lambda: any("supervision failed" in line for line in service.log.texts))
    service.clock.ahead = timedelta(seconds=61)
    query = sa.select(tables.endpoints.c.version).where(tables.endpoints.c.id == endpoint)

    def version() -> Any:
        with service.database.read() as connection:
            return connection.scalar(query)

    service.until(lambda: version() == 2)
    path = f"/v1/fine-tuning/jobs/{service.job()}"
    service.until(lambda: service.call("GET", path).json()["status"] == "running")


def test_a_renewed_lease_holds_and_an_ended_one_keeps_the_split(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 3000, "fallback": split({one: 100})["deployments"]}
    path = "/v1/canary-endpoints/" + service.canary("c", {two: 100}, lease=lease)
    service.clock.ahead = timedelta(seconds=2500)
    renewed = service.call("POST", f"{path}/lease", json={"seconds": 3000}).json()
    assert renewed["version"] == 1
    service.clock.ahead = timedelta(seconds=5000)
    assert service.call("GET", path).json()["lease"] is not None
    ended = service.call("POST", f"{path}/lease", json={"seconds": 0}).json()
    assert (ended["lease"], ended["version"]) == (None, 2)
    service.clock.ahead = timedelta(days=1)
    assert service.call("GET", path).json()["deployments"] == split({two: 100})["deployments"]


def test_a_new_split_brings_its_lease_or_ends_the_one_before(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    path = f"/v1/canary-endpoints/{service.canary('c', {one: 100})}"
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    held = service.call("PATCH", path, json=split({two: 100}, lease=lease)).json()
    assert (held["version"], held["lease"]["seconds"]) == (2, 60)
    renewed = service.call("POST", f"{path}/lease", json={"seconds": 90}).json()
    assert (renewed["version"], renewed["lease"]["seconds"]) == (2, 90)
    free = service.call("PATCH", path, json=split({one: 50, two: 50})).json()
    assert (free["version"], free["lease"]) == (3, None)
    service.clock.ahead = timedelta(seconds=120)
    shown = service.call("GET", path).json()
    assert (shown["version"], shown["deployments"]) == (3, free["deployments"])


def test_one_of_two_drivers_with_the_same_version_is_refused(service: Service) -> None:
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


def test_a_deployment_that_a_fallback_names_is_in_use(service: Service) -> None:
    one, two = service.deployment("one"), service.deployment("two")
    lease = {"seconds": 60, "fallback": split({one: 100})["deployments"]}
    endpoint = service.canary("c", {two: 100}, lease=lease)
    refused = service.call("DELETE", f"/v1/deployments/{one}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "deployment_error")
    assert endpoint in refused.json()["error"]["message"]
    service.call("POST", f"/v1/canary-endpoints/{endpoint}/lease", json={"seconds": 0})
    assert service.call("DELETE", f"/v1/deployments/{one}").status_code == 200


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
    asking.join(60)
    assert answers[0].status_code == 200
    service.until(lambda: service.deployment_status(made) == "deleted")
    assert not service.engines.replicas[0].adapters


@pytest.mark.parametrize("before", [[], [""]], ids=["at once", "on one that drains"])
def test_a_forced_delete_ends_its_generations(
    start: Callable[..., Service], before: list[str]
) -> None:
    service = start(timing=ServiceTiming(deployment_drain_s=1e6))  # so that only force ends them
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
    for query in (*before, "?force=true"):
        assert service.call("DELETE", path + query).json()["status"] == "deleting"
    service.until(lambda: service.deployment_status(made) == "deleted")
    asking.join(60)
    assert answers[0].status_code == 409


def test_metrics_count_every_request_that_has_ended(service: Service) -> None:
    made = service.deployment("one", tags={"fault.error_rate": "0.5", "fault.empty_rate": "0.5"})
    path = f"/v1/deployments/{made}"
    codes = [service.call("POST", f"{path}/generate", json={"prompt": "a"}) for _ in range(30)]
    # The last request is refused as an error of the caller.
    service.call("POST", f"{path}/generate", json={"prompt": ""})
    errors = sum(one.status_code == 500 for one in codes)
    empty = sum(one.status_code == 200 and not one.json()["completion"] for one in codes)
    got = service.call("GET", f"{path}/metrics").json()
    assert got["summary"]["error_rate"]["request_count"] == 30
    assert got["summary"]["error_rate"]["error_count"] == errors
    assert sum(got["metrics"]["token_usage"]["empty_count"]) == empty


def test_the_request_of_a_dead_replica_is_done_by_the_next_one(service: Service) -> None:
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
    service.until(lambda: len(service.engines.replicas) == 2)
    service.engines.may_answer.set()
    asking.join(60)
    assert answers[0].status_code == 200
    summary = service.call("GET", f"{path}/metrics").json()["summary"]["error_rate"]
    assert (summary["request_count"], summary["error_count"]) == (1, 0)


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
    service.rest()
    service.call("POST", f"/v1/fine-tuning/jobs/{job_id}/cancel")
    trainer.complete()
    service.supervisor = service.new_supervisor("next")
    service.go_on()
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


@pytest.mark.parametrize(
    ("exit_code", "reason", "advice"),
    [
        (1, "no_progress", "3 attempts ended without progress (exit code 1)"),
        # Only the system kills a process that its service still needs.
        (-9, "out_of_memory", "a smaller lora_rank or batch_size"),
    ],
)
def test_three_attempts_without_progress_fail_the_job(
    service: Service, exit_code: int, reason: str, advice: str
) -> None:
    """Check that attempts which get no further than the one before are ended; else they would go on for ever."""
    job_id = service.job()
    for number in range(4):
        trainer = service.trainer(number)
        trainer.start_of(9)
        trainer.step(1)
        trainer.code = exit_code
    service.until(lambda: service.job_status(job_id) == "failed")
    got = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()
    assert (got["error"]["code"], got["error"]["reason"]) == ("fine_tuning_error", reason)
    assert advice in got["error"]["message"]
    assert "completed_at" not in got
    assert len(service.engines.trainers) == 4


def lease_of(service: Service, job_id: str) -> tuple[int, datetime]:
    """Return the number of the attempt and the end of its lease."""
    with service.database.read() as connection:
        row = rows.fetch(connection, tables.jobs, job_id, client_id=None)
    assert row is not None
    assert row["lease_until"] is not None
    return row["attempt"], row["lease_until"]


def test_a_worker_that_is_silent_for_longer_than_its_lease_keeps_its_job(service: Service) -> None:
    assert RENEW_EVERY * 2 < LEASE
    job_id = service.job()
    service.trainer()
    for _ in range(5):
        _, before = lease_of(service, job_id)
        service.clock.ahead += RENEW_EVERY
        service.until(lambda before=before: lease_of(service, job_id)[1] > before)
    assert service.clock.ahead > LEASE
    assert lease_of(service, job_id)[0] == len(service.engines.trainers) == 1


def test_a_service_that_stood_still_goes_on_with_its_jobs(service: Service) -> None:
    """Let the leases lapse, as after the machine slept; nobody else works on these jobs."""
    job_id = service.job()
    service.trainer().start_of(2)
    service.clock.ahead = LEASE * 4
    service.until(lambda: lease_of(service, job_id)[1] > service.clock())
    assert lease_of(service, job_id)[0] == len(service.engines.trainers) == 1
    service.trainer().complete()
    service.until(lambda: service.job_status(job_id) == "completed")


def test_an_attempt_that_kept_a_checkpoint_has_advanced_even_behind_the_one_before(
    service: Service,
) -> None:
    """Let the first attempt report eight steps without a checkpoint; each later one keeps a checkpoint and dies."""
    job_id = service.job()
    first = service.trainer(0)
    first.start_of(9)
    first.step(8)
    first.code = 1
    for number in range(1, 5):
        trainer = service.trainer(number)
        trainer.start_of(9, resumed_from=number - 1)
        trainer.step(number)
        (trainer.folder.parent / "checkpoints" / f"step-{number:09}").mkdir()
        trainer.code = 1
    last = service.trainer(5)
    last.start_of(9, resumed_from=4)
    last.complete()
    service.until(lambda: service.job_status(job_id) == "completed")


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


@dataclass
class Halted:
    """A job whose service died after step 1, and whose trainer reported more before it died, too."""

    service: Service
    job_id: str
    trainer: PlayedTrainer

    @contextmanager
    def started_again(self) -> Iterator[Service]:
        settings = self.service.settings
        with Service(settings.data_dir, database_url=settings.database_url) as again:
            again.clock.ahead = LEASE
            yield again

    def go_on(self, again: Service) -> None:
        """Run the job to its end from a checkpoint of step 2."""
        trainer = again.trainer()
        trainer.start_of(3, resumed_from=2)
        trainer.step(3)
        trainer.complete()
        again.until(lambda: again.job_status(self.job_id) == "completed")

    def stream(self, service: Service) -> list[tuple[str, Any]]:
        """Return the steps and epochs that the job's metrics and logs report."""
        path = f"/v1/fine-tuning/jobs/{self.job_id}"
        steps = service.call("GET", f"{path}/metrics").json()["steps"]
        logs = service.call("GET", f"{path}/logs").json()["logs"]
        logged = [("log", one["message"]) for one in logs if one["message"].startswith("epoch ")]
        return [("steps", steps), *logged]

    def events(self, service: Service) -> list[str]:
        query = sa.select(tables.events.c.type).where(tables.events.c.resource_id == self.job_id)
        with service.database.read() as connection:
            return list(connection.scalars(query.order_by(tables.events.c.position)))


@pytest.fixture
def halted(service: Service) -> Halted:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(3)
    trainer.step(1)
    path = f"/v1/fine-tuning/jobs/{job_id}"
    service.until(lambda: service.call("GET", path).json()["current_step"] == 1)
    service.halt()
    trainer.step(2)
    trainer.epoch(1)
    return Halted(service, job_id, trainer)


def test_reports_of_a_trainer_to_a_dead_service_are_stored_once(halted: Halted) -> None:
    """Let the next attempt resume from a checkpoint after the reported step."""
    with halted.started_again() as again:
        halted.go_on(again)
        assert halted.stream(again) == [
            ("steps", [1, 2, 3]),
            ("log", "epoch 1: validation loss 1.0000"),
        ]
        assert halted.events(again).count("fine_tuning.job.epoch_completed") == 1


def test_a_job_that_is_cancelled_while_its_service_is_dead_keeps_what_it_reported(
    halted: Halted,
) -> None:
    halted.service.call("POST", f"/v1/fine-tuning/jobs/{halted.job_id}/cancel")
    assert halted.service.job_status(halted.job_id) == "cancelling"
    with halted.started_again() as again:
        again.until(lambda: again.job_status(halted.job_id) == "cancelled")
        assert again.engines.trainers == []
        assert ("steps", [1, 2]) in halted.stream(again)
        assert halted.events(again).count("fine_tuning.job.epoch_completed") == 1


def test_progress_that_a_dead_machine_left_unreadable_does_not_hold_the_job_up(
    halted: Halted,
) -> None:
    with (halted.trainer.folder / "progress.jsonl").open("ab") as file:
        file.write(bytes(512) + b"\n")
    with halted.started_again() as again:
        halted.go_on(again)
        assert ("steps", [1, 2, 3]) in halted.stream(again)
