"""The installed collection: a task for every operation, which may be given credentials."""

from collections.abc import Iterator
from typing import Any

import pytest
from prefect import Task
from prefect.logging import disable_run_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)
from pydantic import SecretStr

from tests.support.service.in_process import Service
from tuneship.contract.declaring.operation import DECLARED, Operation
from tuneship.contract.jobs import JobCreate, Jobs
from tuneship.prefect import TuneshipCredentials, tasks
from tuneship.prefect.waits import JobOverdue, WaitPolicy, wait_for_dataset, wait_for_job


@pytest.fixture
def no_prefect_server() -> Iterator[None]:
    """Prefect fails where it needs a server, instead of starting a temporary one."""
    settings = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}
    with temporary_settings(settings, restore_defaults={PREFECT_API_URL}):
        yield


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
def test_every_operation_is_a_task_by_its_name(
    operation: Operation[..., Any],
) -> None:
    made = getattr(tasks, operation.name)
    assert isinstance(made, Task)
    assert operation.name in dir(tasks)


def test_a_name_that_is_no_operation_is_no_task() -> None:
    with pytest.raises(AttributeError, match="no_such_operation"):
        tasks.no_such_operation  # noqa: B018 - the look-up itself is what fails


@pytest.mark.usefixtures("no_prefect_server")
def test_a_job_is_made_and_waited_for_at_the_service_of_the_credentials(
    service: Service, credentials: TuneshipCredentials, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = wait_for_dataset.fn(service.dataset(), credentials=credentials)
    wanted = JobCreate(base_model="tuneship-tiny", dataset_id=dataset.id, model_name="notes")
    job = tasks.create_job.fn(wanted, credentials=credentials)
    with disable_run_logger(), pytest.raises(JobOverdue):
        wait_for_job.fn(job.id, WaitPolicy(deadline_seconds=0.0), credentials)
    assert tasks.get_job.fn(job.id, credentials=credentials).status != "cancelled", "it goes on"
    pages = tasks.task_of_pages(Jobs.iterate)
    assert [one.id for one in pages.fn(credentials=credentials)] == [job.id]
    trainer = service.trainer_of(job.id)
    trainer.start_of(1)
    trainer.complete()
    with disable_run_logger():
        assert wait_for_job.fn(job.id, credentials=credentials).status == "completed"
    assert "the progress was not written" not in caplog.text, "outside a run there is no page"


def test_the_key_is_hidden_and_reaches_the_client(credentials: TuneshipCredentials) -> None:
    secret = credentials.api_key.get_secret_value()
    assert secret not in repr(credentials)
    with credentials.get_client() as client:
        assert client.settings.api_key.get_secret_value() == secret
