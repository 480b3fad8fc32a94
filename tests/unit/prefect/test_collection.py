"""The installed collection: a task for every operation, which takes the credentials first."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import Task
from pydantic import SecretStr

from tests.support.in_process import Service
from tests.support.waiting import PATIENCE_S
from tuneship.contract.jobs import JobCreate
from tuneship.contract.operation import DECLARED, Operation
from tuneship.prefect import TuneshipCredentials, tasks
from tuneship.prefect.tasks import NotInTime, wait_for_dataset, wait_for_job


@pytest.fixture
def service(tmp_path: Any) -> Iterator[Service]:
    with Service(tmp_path / "data") as running:
        running.listen()
        yield running


@pytest.fixture
def credentials(service: Service) -> TuneshipCredentials:
    key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
    return TuneshipCredentials(url=service.url, api_key=SecretStr(key), client_id="alice")


@pytest.mark.parametrize("operation", DECLARED, ids=lambda one: one.name)
def test_every_operation_is_a_task_that_takes_the_credentials_first(
    operation: Operation[..., Any],
) -> None:
    made = getattr(tasks, operation.name)
    assert isinstance(made, Task)
    assert operation.name in dir(tasks)
    declared = list(inspect.signature(operation.declaration).parameters)
    assert list(inspect.signature(made.fn).parameters) == ["credentials", *declared]
    assert made.persist_result is False, "a reply may hold a secret or a completion"


def test_a_name_that_is_no_operation_is_no_task() -> None:
    with pytest.raises(AttributeError, match="no_such_operation"):
        tasks.no_such_operation  # noqa: B018 - the look-up itself is what fails


def test_a_job_is_made_and_waited_for_at_the_service_of_the_credentials(
    service: Service, credentials: TuneshipCredentials
) -> None:
    dataset = wait_for_dataset.fn(credentials, service.dataset())
    wanted = JobCreate(base_model="tuneship-tiny", dataset_id=dataset.id, model_name="notes")
    job = tasks.create_job.fn(credentials, wanted)
    with pytest.raises(NotInTime):
        wait_for_job.fn(credentials, job.id, PATIENCE_S, poll_seconds=2 * PATIENCE_S)
    trainer = service.trainer_of(job.id)
    trainer.start_of(1)
    trainer.complete()
    assert wait_for_job.fn(credentials, job.id).status == "completed"


def test_the_key_is_hidden_and_reaches_the_client(credentials: TuneshipCredentials) -> None:
    secret = credentials.api_key.get_secret_value()
    assert secret not in repr(credentials)
    with credentials.get_client() as client:
        assert client.settings.api_key.get_secret_value() == secret
