"""Replicas follow the requests of a deployment, and a lost one costs no request; replicas and clock are played."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import pytest

from tests.service.deployments.test_deployments import events_of, get, kinds, logs, path_of
from tests.support.service.in_process import Service

Start = Callable[..., Service]
AUTO = {"auto_scaling": True, "max_replicas": 3}
IDLE = timedelta(seconds=301)


@pytest.fixture
def service(start: Start, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service on a machine with enough cores, which keeps no process without a deployment."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return start(preload_base_models=False, generate_timeout_s=10_000)


def alive(service: Service) -> int:
    return [one.code for one in service.engines.replicas].count(None)


def current(service: Service, deployment_id: str) -> int:
    return get(service, deployment_id)["current_replicas"]


def ask(service: Service, deployment_id: str) -> httpx.Response:
    return service.call("POST", path_of(deployment_id, "/generate"), json={"prompt": "a"})


def asked(
    service: Service, pool: ThreadPoolExecutor, deployment_id: str, number: int
) -> list["Future[httpx.Response]"]:
    """Send requests and wait until the replicas have them; they are answered when `may_answer` is set."""
    service.engines.may_answer.clear()
    before = len(service.engines.prompts)
    futures = [pool.submit(ask, service, deployment_id) for _ in range(number)]
    service.until(lambda: len(service.engines.prompts) == before + number)
    return futures


def reasons(service: Service, deployment_id: str) -> list[str]:
    found = logs(service, deployment_id, filter="message~replicas wanted", order="asc")
    return [one["message"].removeprefix("replicas wanted: ") for one in found]


def test_a_queue_brings_replicas_and_calm_takes_them_away_again(service: Service) -> None:
    deployment = service.deployment("one", **AUTO)
    service.engines.rows = 1
    with ThreadPoolExecutor(4) as pool:
        answers = asked(service, pool, deployment, 4)
        service.clock.ahead += timedelta(seconds=5)
        service.until(lambda: current(service, deployment) >= 2)  # already 3 if this test was slow
        service.clock.ahead += timedelta(seconds=5)
        service.until(lambda: current(service, deployment) == 3)
        service.engines.may_answer.set()
        assert [one.result().status_code for one in answers] == [200] * 4
    for left in (2, 1):
        service.clock.ahead += IDLE
        service.until(lambda left=left: current(service, deployment) == left)
    service.until(lambda: alive(service) == 1)
    service.clock.ahead += IDLE
    assert ask(service, deployment).status_code == 200
    said = reasons(service, deployment)
    assert [one.split(":")[0] for one in said] == [
        "2 instead of 1",
        "3 instead of 2",
        "2 instead of 3",
        "1 instead of 2",
    ]
    assert "4 requests wait, the longest" in said[0]
    scaled = [data for kind, data in events_of(service, deployment) if kind == "scaling_changed"]
    assert [one["current_replicas"] for one in scaled] == [1, 2, 3, 2, 1]
    assert kinds(service, deployment).count("health_changed") == 1


def test_without_auto_scaling_a_queue_brings_nothing(service: Service) -> None:
    deployment = service.deployment("one", max_replicas=3)
    service.engines.rows = 1
    with ThreadPoolExecutor(4) as pool:
        answers = asked(service, pool, deployment, 4)
        service.clock.ahead += timedelta(seconds=5)
        other = service.deployment("later", **AUTO)
        service.clock.ahead += timedelta(seconds=5)
        service.until(lambda: get(service, other)["health"] == "healthy")
        service.engines.may_answer.set()
        assert [one.result().status_code for one in answers] == [200] * 4
    assert reasons(service, deployment) == []
    assert alive(service) == 1


def test_a_machine_without_room_bounds_the_replicas_and_what_is_asked_for_does_not_shrink(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    deployment = service.deployment("one", **AUTO)
    service.engines.rows = 1
    with ThreadPoolExecutor(4) as pool:
        answers = asked(service, pool, deployment, 4)
        for _ in range(2):
            service.clock.ahead += timedelta(seconds=5)
            service.until(lambda: current(service, deployment) == 2)
        fixed = service.deployment("fixed", min_replicas=3, max_replicas=3)
        service.until(lambda: current(service, fixed) == 3)
        service.engines.may_answer.set()
        assert [one.result().status_code for one in answers] == [200] * 4
    assert current(service, deployment) == 2


def asleep(service: Service, deployment_id: str) -> None:
    """Move the clock until the deployment sleeps; nobody outside can see from when on it counts as idle."""

    def is_asleep() -> bool:
        service.clock.ahead += IDLE
        return current(service, deployment_id) == 0

    service.until(is_asleep)


def test_a_deployment_that_may_sleep_sleeps_and_the_next_requests_wake_it(service: Service) -> None:
    deployment = service.deployment("one", min_replicas=0, auto_scaling=True)
    assert current(service, deployment) == 1
    asleep(service, deployment)
    service.until(lambda: alive(service) == 0)
    assert (get(service, deployment)["status"], get(service, deployment)["health"]) == (
        "running",
        "healthy",
    )
    service.engines.may_start.clear()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, service, deployment) for _ in range(8)]
        service.until(lambda: alive(service) == 1)
        service.clock.ahead += timedelta(seconds=5)
        service.engines.may_start.set()
        assert [one.result().status_code for one in answers] == [200] * 8
    service.until(lambda: current(service, deployment) == 1)
    assert len(service.engines.replicas) == 2
    assert [
        one["to"] for kind, one in events_of(service, deployment) if kind == "health_changed"
    ] == ["healthy"]
    assert [one.partition(": ")[2] for one in reasons(service, deployment)][
        1
    ] == "a request woke it"


def test_one_that_sleeps_frees_its_adapter_while_others_use_the_process(service: Service) -> None:
    tuned = service.model()
    awake = service.deployment("awake")
    sleeper = service.deployment("sleeper", model_name=tuned, min_replicas=0, auto_scaling=True)
    (replica,) = service.engines.replicas
    assert replica.adapters == {tuned}
    asleep(service, sleeper)
    service.until(lambda: replica.adapters == set())
    assert (current(service, awake), alive(service)) == (1, 1)
    assert ask(service, sleeper).status_code == 200
    service.until(lambda: current(service, sleeper) == 1)
    assert replica.adapters == {tuned}


def test_one_that_sleeps_does_so_after_a_restart_and_wakes_then(service: Service) -> None:
    deployment = service.deployment("one", min_replicas=0, auto_scaling=True)
    asleep(service, deployment)
    service.rest()
    settings = service.settings
    again = Service(
        settings.data_dir, database_url=settings.database_url, preload_base_models=False
    )
    with again:
        other = again.deployment("other", model_name="tuneship-tiny")
        assert current(again, other) == 1
        assert current(again, deployment) == 0
        assert ask(again, deployment).status_code == 200
        again.until(lambda: current(again, deployment) == 1)


def test_a_wake_that_fails_is_a_503_and_makes_it_unhealthy(service: Service) -> None:
    deployment = service.deployment("one", min_replicas=0, auto_scaling=True)
    asleep(service, deployment)
    service.until(lambda: alive(service) == 0)
    service.engines.fault = "no memory is left"
    answer = ask(service, deployment)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "internal_error")
    assert answer.headers["retry-after"] == "1"
    service.until(lambda: get(service, deployment)["health"] == "unhealthy")
    service.engines.fault = ""
    service.until(lambda: get(service, deployment)["health"] == "healthy")
    assert ask(service, deployment).status_code == 200


def test_a_request_whose_replica_is_lost_is_done_by_the_next(service: Service) -> None:
    deployment = service.deployment("one")
    with ThreadPoolExecutor(4) as pool:
        answers = asked(service, pool, deployment, 4)
        service.engines.may_start.clear()
        service.engines.replicas[0].kill()
        service.until(lambda: len(service.engines.replicas) == 2)
        service.engines.may_answer.set()
        service.engines.may_start.set()
        assert [one.result().status_code for one in answers] == [200] * 4
    summary = service.call("GET", path_of(deployment, "/metrics")).json()["summary"]["error_rate"]
    assert (summary["request_count"], summary["error_count"]) == (4, 0)


def test_a_request_that_loses_two_replicas_is_a_503_that_says_try_again(service: Service) -> None:
    deployment = service.deployment("one")
    with ThreadPoolExecutor(1) as pool:
        (answer,) = asked(service, pool, deployment, 1)
        service.engines.replicas[0].kill()
        service.until(lambda: len(service.engines.prompts) == 2)
        service.engines.replicas[1].kill()
        found = answer.result()
    error: dict[str, Any] = found.json()["error"]
    assert (found.status_code, error["code"]) == (503, "internal_error")
    assert (found.headers["retry-after"], found.headers["x-should-retry"]) == ("1", "true")
    service.engines.may_answer.set()
    assert ask(service, deployment).status_code == 200


def test_a_patch_to_more_replicas_that_do_not_start_leaves_it_running_and_goes_on_trying(
    service: Service,
) -> None:
    deployment = service.deployment("one")
    service.engines.fault = "no memory is left"
    service.call("PATCH", path_of(deployment), json={"min_replicas": 2, "max_replicas": 2})
    service.until(lambda: service.deployment_status(deployment) == "running")
    assert (get(service, deployment)["health"], current(service, deployment)) == ("healthy", 1)
    assert ask(service, deployment).status_code == 200
    service.until(lambda: bool(logs(service, deployment, filter="message~not started")))
    service.engines.fault = ""
    service.until(lambda: current(service, deployment) == 2)


def test_replicas_that_came_while_the_others_were_probed_stay(service: Service) -> None:
    service.deployment("one")
    service.engines.may_probe.clear()
    before = service.engines.probes
    service.until(lambda: service.engines.probes > before)
    service.deployment("larger", min_replicas=3, max_replicas=3)
    service.engines.may_probe.set()
    after = service.engines.probes
    service.until(lambda: service.engines.probes >= after + 3)  # the next round, which sees them
    assert [one.code for one in service.engines.replicas] == [None] * 3
