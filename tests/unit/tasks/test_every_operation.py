"""Every operation of the API is one task, so that people can compose flows of their own."""

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
from tasks.api import CALL_DEADLINE_S, api, connect, disconnect, transient
from tasks.create_once import once
from tuneship.client import DeadlineExceeded
from tuneship.contract.operation import DECLARED
from tuneship.settings import ClientSettings

COMPOSED = {
    "answer_prompts",
    "wait_for_dataset",
    "wait_for_deployment",
    "wait_for_job",
    "wait_for_jobs",
}
"""Tasks of more than one call."""
SENT_ONCE = {"update_canary_endpoint", "renew_canary_lease", "get_deployment_metrics"}
"""Their callers know what a lost answer means, or look again soon."""
SECRETS = {"create_webhook", "rotate_webhook_secret"}


def every_task() -> dict[str, Task[..., Any]]:
    """By name, from every module of `tasks/`."""
    found: dict[str, Task[..., Any]] = {}
    for file in sorted(Path(str(tasks.__file__)).parent.glob("*.py")):
        module = import_module(f"tasks.{file.stem}")
        for one in vars(module).values():
            if isinstance(one, Task) and one.fn.__module__ == module.__name__:
                assert one.fn.__name__ not in found, "two tasks of one name"
                found[one.fn.__name__] = one
    return found


TASKS = every_task()


def test_every_operation_is_exactly_one_task() -> None:
    assert set(TASKS) - COMPOSED == {operation.name for operation in DECLARED}
    assert set(TASKS) >= COMPOSED


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
def test_what_creates_is_made_once_for_a_run(operation: Any) -> None:
    assert "run_key" in TASKS[operation.name].fn.__annotations__


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
