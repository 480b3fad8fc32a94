"""Every operation of the API can be used as a task, so that people can compose flows of their own."""

import inspect
import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prefect import Task
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed
from pydantic import SecretStr

import tasks
from tasks.create_once import once
from tuneship.client import DeadlineExceeded
from tuneship.contract.declaring.operation import DECLARED, Operation
from tuneship.prefect.calls import CALL_DEADLINE_S, transient
from tuneship.prefect.connection import api, connect, disconnect
from tuneship.prefect.tasks import task_of
from tuneship.settings import ClientSettings

# Tasks that make more than one call.
COMPOSED = {"answer_prompts"}
# Tasks that are not repeated, because their callers read the state back or look again soon.
SENT_ONCE = {"update_canary_endpoint", "renew_canary_lease", "get_deployment_metrics"}
SECRETS = {"create_webhook", "rotate_webhook_secret"}


def written_tasks() -> dict[str, Task[..., Any]]:
    """Return the tasks of every module of `tasks/`, by name."""
    written: dict[str, Task[..., Any]] = {}
    for file in sorted(Path(str(tasks.__file__)).parent.glob("*.py")):
        for name, value in vars(import_module(f"tasks.{file.stem}")).items():
            if isinstance(value, Task):
                assert written.setdefault(name, value) is value, "two tasks of one name"
    return written


WRITTEN = written_tasks()
TASKS = {operation.name: task_of(operation) for operation in DECLARED} | WRITTEN


def test_a_task_has_the_name_of_its_operation() -> None:
    assert set(WRITTEN) - COMPOSED <= {operation.name for operation in DECLARED}
    assert set(WRITTEN) >= COMPOSED
    assert all(TASKS[name].name == name for name in TASKS)


@pytest.mark.parametrize("operation", DECLARED, ids=lambda one: one.name)
def test_a_task_is_made_from_any_declaration(operation: Operation[..., Any]) -> None:
    task = task_of(operation)
    *parameters, credentials = inspect.signature(task.fn).parameters.values()
    assert parameters == list(inspect.signature(operation.declaration).parameters.values())
    assert (credentials.name, credentials.default) == ("credentials", None)
    assert task.fn.__doc__ == operation.declaration.__doc__
    assert task.persist_result is False, "a reply may hold a secret or a completion"
    assert isinstance(task.task_run_name, str)
    assert re.findall(r"{(\w+)}", task.task_run_name) == list(operation.path_parameters)


@pytest.mark.parametrize("name", [one.name for one in DECLARED])
def test_a_task_of_an_operation_has_a_run_name_and_a_retry_for_what_is_worth_it(name: str) -> None:
    one = TASKS[name]
    assert one.task_run_name, "the run's page would not say what it was about"
    assert one.fn.__doc__
    if name in SENT_ONCE:
        assert one.retries == 0
    else:
        assert one.retries == 2
        assert one.retry_condition_fn is not None
        assert one.retry_jitter_factor


@pytest.mark.parametrize("operation", [one for one in DECLARED if one.is_creating])
def test_a_creating_task_creates_once_for_a_run(operation: Any) -> None:
    # A release is announced by the key of its run.
    body = operation.body_parameter[1].model_fields if operation.body_parameter else {}
    assert "run_key" in {*TASKS[operation.name].fn.__annotations__, *body}


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_secret_is_written_nowhere(name: str) -> None:
    assert TASKS[name].persist_result is False


def test_a_task_whose_deadline_has_passed_is_not_begun_again() -> None:
    overdue = DeadlineExceeded("get_job: no answer before the deadline")
    assert overdue.retryable, "for who reads a split back: it may have been applied"
    task, state = TASKS["get_job"], Failed(data=overdue)
    assert not transient(task, TaskRun.model_construct(), state)


def test_every_client_of_a_task_has_a_deadline() -> None:
    connect(ClientSettings(url="http://service", api_key=SecretStr("key"), client_id="tests"))
    try:
        for client, seconds in ((api(), CALL_DEADLINE_S), (once("run", "step", {}, 500.0), 500.0)):
            left = (client.options.ends_at or 0.0) - time.monotonic()
            assert 0 < left <= seconds
    finally:
        disconnect()
