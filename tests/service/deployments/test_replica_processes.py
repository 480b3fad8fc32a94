"""Replicas run as real processes whose number follows the deployment and its load; killing them loses no request."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import TypedDict, Unpack

import pytest

from tests.support.service.processes import Serve, running_deployment
from tests.support.waiting import is_alive, until
from tuneship.client import Client
from tuneship.contract.deployments import (
    Deployment,
    DeploymentCreate,
    DeploymentStatus,
    DeploymentUpdate,
    ModelConfiguration,
)
from tuneship.contract.errors import InternalError
from tuneship.contract.generation import Generate

pytestmark = pytest.mark.slow
SERVING = "tuneship.serving"
MODEL = "tuneship-tiny"
LONG = Generate(prompt="case", max_tokens=128, temperature=2.0)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    settings = {
        "auto_scaling_idle_s": "2",
        "auto_scaling_queue_s": "0.02",
        "generate_requests_per_minute": "0",
    }
    started = Serve(tmp_path_factory.mktemp("serve") / "data", **settings)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def client(serve: Serve) -> Client:
    return serve.client()


@pytest.fixture
def deployment(client: Client) -> Iterator[str]:
    deployment = running_deployment(client, "one", MODEL)
    yield deployment
    client.deployments.delete(deployment)
    until(lambda: client.deployments.get(deployment).status == "deleted")


class Options(TypedDict, total=False):
    """Fields of `DeploymentCreate`."""

    min_replicas: int
    max_replicas: int
    auto_scaling: bool


@dataclass
class Load:
    """Callers who repeat a request until the load is over, and the answers that they got."""

    callers: range
    is_over: Event = field(default_factory=Event)
    statuses: list[int] = field(default_factory=list[int])
    ids: list[str] = field(default_factory=list[str])
    # How many answers each caller got.
    answered: Counter[int] = field(default_factory=Counter[int])

    def ask(self, caller: int, client: Client, deployment: str, request: Generate) -> None:
        while not self.is_over.is_set():
            try:
                self.ids.append(client.deployments.generate(deployment, request).id)
            except InternalError as error:
                self.statuses.append(error.status)
            else:
                self.statuses.append(200)
            self.answered[caller] += 1

    def go_on(self) -> None:
        """Wait until every caller got another answer, so that every open request began after this call."""
        before = self.answered.copy()
        until(lambda: all(self.answered[caller] > before[caller] for caller in self.callers))


@contextmanager
def load(client: Client, deployment: str, callers: int, request: Generate = LONG) -> Iterator[Load]:
    """Let so many callers send one request after the other, each tried once."""
    running_load, once = Load(range(callers)), client.with_options(tries=1)
    with ThreadPoolExecutor(callers) as pool:
        asking: list[Future[None]] = [
            pool.submit(running_load.ask, caller, once, deployment, request)
            for caller in running_load.callers
        ]
        try:
            yield running_load
        finally:
            running_load.is_over.set()
    for one in asking:
        one.result()


def replicas(client: Client, deployment: str) -> Callable[[], int]:
    return lambda: client.deployments.get(deployment).current_replicas


def replica_messages(client: Client, deployment: str) -> list[str]:
    """The log's messages about the deployment's replicas, oldest first."""
    found = client.deployments.logs(deployment, filter="component=replica", order="asc").logs
    return [entry.message for entry in found]


def started(client: Client, deployment: str) -> int:
    """How many replicas have started according to the log, including those that have ended."""
    return replica_messages(client, deployment).count("replica started")


def only_replica(serve: Serve) -> int:
    """The only process that serves, once those of earlier deployments are gone."""

    def alone() -> list[int]:
        found = serve.workers(SERVING)
        return found if len(found) == 1 else []

    return until(alone)[0]


def kill(serve: Serve, client: Client, deployment: str, count: int) -> None:
    """Kill so many replicas and wait until others have come.

    The record shows the old state for a while, and processes do not vanish at once; so the log is asked which new
    processes have started.
    """
    before = serve.workers(SERVING)

    def alive() -> int:
        """The number of live replicas according to the log, which is one round late."""
        messages = replica_messages(client, deployment)
        ends = messages.count("replica lost") + messages.count("replica ended")
        return messages.count("replica started") - ends

    until(lambda: alive() == len(before))
    known = started(client, deployment)
    for process in before[:count]:
        os.kill(process, signal.SIGKILL)
    until(lambda: not any(map(is_alive, before[:count])))
    until(lambda: started(client, deployment) - known == count)


@contextmanager
def deployed(client: Client, name: str, **options: Unpack[Options]) -> Iterator[str]:
    """Deploy with these options, and delete it however the test ends, because the next test counts processes."""
    deployment = client.deployments.create(
        DeploymentCreate(model_name=MODEL, deployment_name=name, **options)
    ).id
    try:
        yield deployment
    finally:
        client.deployments.delete(deployment)
        until(lambda: client.deployments.get(deployment).status == "deleted")


def test_no_request_fails_while_replicas_are_added_changed_and_removed(
    serve: Serve, client: Client, deployment: str
) -> None:
    first = only_replica(serve)
    now = replicas(client, deployment)

    def changed(update: DeploymentUpdate) -> Deployment:
        client.deployments.update(deployment, update)
        until(lambda: client.deployments.get(deployment).status == DeploymentStatus.RUNNING)
        return client.deployments.get(deployment)

    with load(client, deployment, 4) as answers:
        assert changed(DeploymentUpdate(min_replicas=2, max_replicas=2)).current_replicas == 2
        assert len(serve.workers(SERVING)) == 2
        generation = ModelConfiguration(default_temperature=0.1)
        changed(DeploymentUpdate(model_config=generation))
        until(lambda: len(answers.statuses) > 8)
        changed(DeploymentUpdate(min_replicas=1, max_replicas=1))
        until(lambda: serve.workers(SERVING) == [first])
        until(lambda: now() == 1)
    assert set(answers.statuses) == {200}


def test_kills_under_load_lose_no_request_and_answer_none_twice(
    serve: Serve, client: Client
) -> None:
    with deployed(client, "two", min_replicas=2, max_replicas=2) as deployment:
        now = replicas(client, deployment)
        until(lambda: now() == 2)
        with load(client, deployment, 8) as answers:
            for _ in range(2):  # one of two: the other takes over its requests
                answers.go_on()
                kill(serve, client, deployment, 1)
            assert set(answers.statuses) == {200}
            kill(serve, client, deployment, 2)  # both: the requests wait for the next ones
            answers.go_on()
        counts = Counter(answers.statuses)
        assert set(counts) <= {200, 503}
        assert counts[200] == len(answers.ids) == len(set(answers.ids))
        summary = client.deployments.metrics(deployment).summary.error_rate
        assert summary is not None
        assert (summary.request_count, summary.error_count) == (counts.total(), counts[503])
        until(lambda: client.deployments.get(deployment).health == "healthy")
        assert client.deployments.get(deployment).status == DeploymentStatus.RUNNING
        assert replica_messages(client, deployment).count("replica lost") == 4


def test_a_deployment_grows_with_its_queue_shrinks_sleeps_and_wakes(
    serve: Serve, client: Client
) -> None:
    with deployed(client, "auto", min_replicas=0, max_replicas=2, auto_scaling=True) as deployment:
        now = replicas(client, deployment)
        until(lambda: now() == 1)
        if len(os.sched_getaffinity(0)) > 1:
            with load(client, deployment, 48) as answers:
                until(lambda: now() == 2)
            assert set(answers.statuses) == {200}
            found = client.deployments.logs(deployment, filter="message~requests wait").logs
            assert found[-1].message.startswith("replicas wanted: 2 instead of 1")
        until(lambda: now() == 0)
        until(lambda: serve.workers(SERVING) == [])
        record, slept = client.deployments.get(deployment), started(client, deployment)
        assert (record.status, record.health) == (DeploymentStatus.RUNNING, "healthy")
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(client.deployments.generate, deployment, LONG) for _ in range(4)]
            assert {one.result().deployment_id for one in asked} == {deployment}
        until(lambda: started(client, deployment) - slept)
        until(lambda: serve.workers(SERVING) == [])  # it sleeps again, so the log has every start
        assert started(client, deployment) - slept == 1


def test_a_killed_process_comes_back_without_a_request(
    serve: Serve, client: Client, deployment: str
) -> None:
    first = only_replica(serve)
    kill(serve, client, deployment, 1)
    (second,) = serve.workers(SERVING)
    assert second != first
    until(lambda: replica_messages(client, deployment)[-2:] == ["replica lost", "replica started"])
    until(lambda: client.deployments.get(deployment).health == "healthy")
