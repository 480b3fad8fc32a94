"""The log of a deployment reports the replicas that serve it, and nothing about other tenants' deployments."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.deployments.test_deployments import get, path_of
from tests.support.service.in_process import Service

pytestmark = pytest.mark.both_databases(postgres="soak")


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    return start(preload_base_models=False)


def replica_messages(service: Service, deployment: str, client: str = "alice") -> list[str]:
    """The log's messages about replicas, oldest first."""
    path = path_of(deployment, "/logs")
    query = {"filter": "component=replica", "order": "asc"}
    found = service.call("GET", path, client, params=query).json()["logs"]
    return [one["message"] for one in found]


def alive(service: Service) -> int:
    return [one.code for one in service.engines.replicas].count(None)


def scale(service: Service, deployment: str, number: int) -> None:
    body = {"min_replicas": number, "max_replicas": number}
    service.call("PATCH", path_of(deployment), json=body)
    service.until(lambda: get(service, deployment)["current_replicas"] == number)
    service.until(lambda: alive(service) == number)


def rounds(service: Service, number: int = 3) -> None:
    """Wait for so many rounds of the supervisor, after which all news is in the log."""
    before = service.engines.probes
    service.until(lambda: service.engines.probes >= before + number * max(1, alive(service)))


@pytest.mark.parametrize("tuned", [False, True])
def test_a_tenant_does_not_hear_of_anothers_replicas(service: Service, tuned: bool) -> None:
    """Both tenants deploy the base model itself, or each deploys its own adapter on the same replicas."""
    fields: list[dict[str, Any]] = [
        {"model_name": service.model(one)} if tuned else {} for one in ("alice", "bob")
    ]
    mine = service.deployment("mine", **fields[0])
    theirs = service.deployment("theirs", "bob", **fields[1])
    service.until(lambda: replica_messages(service, theirs, "bob") == ["replica started"])
    scale(service, mine, 3)
    service.until(lambda: replica_messages(service, mine) == ["replica started"] * 3)
    scale(service, mine, 1)
    service.until(lambda: replica_messages(service, mine).count("replica ended") == 2)
    rounds(service)
    assert replica_messages(service, theirs, "bob") == ["replica started"]


def test_a_start_for_another_tenant_that_fails_is_not_reported(service: Service) -> None:
    mine, theirs = service.deployment("mine"), service.deployment("theirs", "bob")
    service.until(lambda: replica_messages(service, theirs, "bob") == ["replica started"])
    service.engines.fault = "no memory is left"
    body = {"min_replicas": 2, "max_replicas": 2}
    service.call("PATCH", path_of(mine), json=body)
    service.until(lambda: any("not started" in one for one in replica_messages(service, mine)))
    rounds(service)
    assert replica_messages(service, theirs, "bob") == ["replica started"]


def test_a_replica_that_is_lost_is_reported_to_all_whom_it_served(service: Service) -> None:
    mine, theirs = service.deployment("mine"), service.deployment("theirs", "bob")
    service.until(
        lambda: (
            replica_messages(service, mine)
            == replica_messages(service, theirs, "bob")
            == ["replica started"]
        )
    )
    service.engines.replicas[0].kill()
    expected = ["replica started", "replica lost", "replica started"]
    service.until(
        lambda: (
            replica_messages(service, mine) == replica_messages(service, theirs, "bob") == expected
        )
    )


def test_no_line_names_a_process(service: Service) -> None:
    deployment = service.deployment("d")
    service.until(lambda: replica_messages(service, deployment) == ["replica started"])
    service.engines.replicas[0].kill()
    service.until(lambda: len(replica_messages(service, deployment)) == 3)
    assert not re.search(r"\d", "".join(replica_messages(service, deployment)))
    assert any(re.search(r"replica lost: process \d+", line) for line in service.log.texts)
