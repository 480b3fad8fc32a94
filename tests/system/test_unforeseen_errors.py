"""Background work that fails for an unforeseen reason is retried a few times and then reported as failed to its owner;
if the database is away, it waits for the database.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from tests.support.service.in_process import Service, split
from tuneship.replicas.local_replicas import LocalReplicas
from tuneship.service.background.background_retries import LONGEST_PAUSE, TRIES, BackgroundRetries
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.service.deployments.deployment_keeper import DeploymentKeeper
from tuneship.service.deployments.replica_health import HealthChecks
from tuneship.service.jobs import record_progress, training_keeper
from tuneship.store.database import tables
from tuneship.store.database.database import is_away
from tuneship.store.records import endpoint_records

Start = Callable[..., Service]
PRIVATE = "text of /a/private/path"
AWAY = exc.OperationalError("select", {}, Exception(PRIVATE))


class Fault:
    """A method that is replaced by one that raises, for all names or for one, until it is repaired."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
        self.error: Exception | None = error
        self.tries = 0
        self.only = ""
        really = getattr(owner, name)

        def broken(*arguments: Any, **named: Any) -> Any:
            if self.error is None or self.only not in str(arguments):
                return really(*arguments, **named)
            self.tries += 1
            raise self.error

        patch.setattr(owner, name, broken)


def after_pauses(service: Service, holds: Callable[[], bool]) -> None:
    """Let the longest pause pass repeatedly until the condition holds."""

    def passed() -> bool:
        service.clock.ahead += LONGEST_PAUSE + timedelta(seconds=1)
        service.database.announce()
        return holds()

    service.until(passed)


def dataset_of(service: Service, dataset_id: str) -> dict[str, Any]:
    return service.call("GET", f"/v1/datasets/{dataset_id}").json()


def deployment_of(service: Service, deployment_id: str) -> dict[str, Any]:
    return service.call("GET", f"/v1/deployments/{deployment_id}").json()


def made(service: Service, name: str) -> str:
    body = {"model_name": "tuneship-tiny", "deployment_name": name}
    return service.call("POST", "/v1/deployments", json=body).json()["id"]


@pytest.mark.both_databases
def test_a_dataset_that_cannot_be_processed_fails_after_a_few_tries_and_holds_up_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(inline_dataset_bytes=1)
    service.rest()
    first = service.dataset()
    fault = Fault(monkeypatch, DatasetProcessing, "_read", ZeroDivisionError(PRIVATE))
    fault.only = first
    second = service.dataset()
    service.go_on()
    service.until(lambda: dataset_of(service, second)["status"] == "processed")
    assert fault.tries == 1
    after_pauses(service, lambda: dataset_of(service, first)["status"] == "failed")
    assert fault.tries == TRIES
    error = dataset_of(service, first)["error"]
    assert error["code"] == "internal_error"
    assert f"{TRIES} attempts ended with an internal error (ZeroDivisionError)" in error["message"]
    assert PRIVATE not in error["message"]


def test_a_dataset_waits_for_the_database_however_long(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(inline_dataset_bytes=1)
    fault = Fault(monkeypatch, DatasetProcessing, "_read", AWAY)
    first = service.dataset()
    after_pauses(service, lambda: fault.tries > 2 * TRIES)
    assert dataset_of(service, first)["status"] == "processing"
    fault.error = None
    after_pauses(service, lambda: dataset_of(service, first)["status"] == "processed")


@pytest.mark.both_databases
def test_a_deployment_that_cannot_be_settled_fails_after_a_few_tries(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, DeploymentKeeper, "_checked_model", ZeroDivisionError(PRIVATE))
    first = made(service, "first")
    after_pauses(service, lambda: deployment_of(service, first)["status"] == "failed")
    assert fault.tries == TRIES
    message = deployment_of(service, first)["error"]["message"]
    assert "internal error (ZeroDivisionError)" in message
    assert PRIVATE not in message
    fault.error = None
    service.call("PATCH", f"/v1/deployments/{first}", json={"max_replicas": 2})
    service.until(lambda: deployment_of(service, first)["status"] == "running")


def test_a_deployment_waits_for_the_database_however_long(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, DeploymentKeeper, "_checked_model", AWAY)
    first = made(service, "first")
    after_pauses(service, lambda: fault.tries > 2 * TRIES)
    assert deployment_of(service, first)["status"] == "creating"
    fault.error = None
    after_pauses(service, lambda: deployment_of(service, first)["status"] == "running")


def test_a_deployment_whose_model_cannot_be_unloaded_is_deleted_all_the_same(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = service.deployment("first", model_name=service.model())
    fault = Fault(monkeypatch, LocalReplicas, "unload", ZeroDivisionError(PRIVATE))
    assert service.call("DELETE", f"/v1/deployments/{first}").is_success
    query = sa.select(tables.deployments.c.status).where(tables.deployments.c.id == first)

    def is_deleted() -> bool:
        with service.database.read() as connection:
            return connection.scalar(query) == "deleted"

    after_pauses(service, is_deleted)
    assert fault.tries == TRIES


def test_after_a_restart_rounds_begin_although_a_model_cannot_be_looked_at(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = service.deployment("first")
    service.rest()
    fault = Fault(monkeypatch, DeploymentKeeper, "_checked_model", ZeroDivisionError(PRIVATE))
    rounds: list[str] = []
    look = HealthChecks.watched

    def charges(self: HealthChecks) -> Any:
        found = look(self)
        rounds.extend(one.row["id"] for one in found)
        return found

    monkeypatch.setattr(HealthChecks, "watched", charges)
    service.go_on()
    service.until(lambda: first in rounds)
    assert fault.tries == 1
    assert deployment_of(service, first)["status"] == "running"


def test_replicas_that_cannot_be_made_ready_for_an_unforeseen_reason_fail_their_deployment(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = service.deployment("first")
    fault = Fault(monkeypatch, LocalReplicas, "ready", ZeroDivisionError(PRIVATE))
    after_pauses(service, lambda: deployment_of(service, first)["status"] == "failed")
    assert fault.tries >= 3
    message = deployment_of(service, first)["error"]["message"]
    assert "internal error (ZeroDivisionError)" in message
    assert PRIVATE not in message


def test_a_job_that_cannot_be_followed_for_an_unforeseen_reason_fails(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.job()
    trainer = service.trainer()
    fault = Fault(monkeypatch, record_progress, "store_lines", ZeroDivisionError(PRIVATE))
    trainer.start_of(2)
    after_pauses(service, lambda: service.job_status(job_id) == "failed")
    error = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["error"]
    assert fault.tries == training_keeper.TRIES
    assert error["reason"] == "internal"
    assert "internal error (ZeroDivisionError)" in error["message"]
    assert PRIVATE not in error["message"]
    service.until(lambda: trainer.code is not None)


@pytest.mark.both_databases
def test_a_lease_that_cannot_be_ended_is_tried_with_pauses_and_others_end(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = service.deployment("old"), service.deployment("new")
    lease = {"seconds": 60, "fallback": split({old: 100})["deployments"]}
    bad, good = (service.canary(name, {new: 100}, lease=lease) for name in ("bad", "good"))
    fault = Fault(monkeypatch, endpoint_records, "swap", ZeroDivisionError(PRIVATE))
    fault.only = bad
    service.clock.ahead += timedelta(seconds=61)
    query = sa.select(tables.endpoints.c.lease_until)

    def until_of(endpoint_id: str) -> Any:
        with service.database.read() as connection:
            return connection.scalar(query.where(tables.endpoints.c.id == endpoint_id))

    service.until(lambda: until_of(good) is None and fault.tries > 0)
    assert until_of(bad) is not None
    fault.error = None
    after_pauses(service, lambda: until_of(bad) is None)


def test_pauses_double_up_to_the_longest_and_a_clock_that_goes_back_ends_them() -> None:
    moments = [datetime(2026, 1, 1, tzinfo=UTC)]
    troubles = BackgroundRetries(lambda: moments[0], tries=10)
    pauses: list[int] = []
    for _ in range(7):
        troubles.add("one", ZeroDivisionError())
        begun = moments[0]
        while troubles.is_waiting("one"):
            moments[0] += timedelta(seconds=1)
        pauses.append(int((moments[0] - begun).total_seconds()))
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    troubles.add("one", ZeroDivisionError())
    assert troubles.waiting() == ["one"]
    moments[0] -= timedelta(days=1)
    assert troubles.waiting() == []
    troubles.end("one")
    assert troubles.given_up("one") is None


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (AWAY, True),
        (exc.InterfaceError("select", {}, Exception()), True),
        (exc.TimeoutError(), True),
        (exc.DataError("insert", {}, Exception()), False),
        (exc.IntegrityError("insert", {}, Exception()), False),
        (exc.ProgrammingError("insert", {}, Exception()), False),
        (exc.ArgumentError(), False),
        (OSError(), False),
    ],
)
def test_a_database_that_refuses_a_value_is_not_away(error: Exception, away: bool) -> None:
    assert is_away(error) is away
