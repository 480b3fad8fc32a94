"""A Prefect task for each operation of the API, by its name: `from tuneship.prefect.tasks import create_job, get_job`.

Their first argument is the block `TuneshipCredentials`; the others, and the reply, are those of the operation. A new
operation needs no line here. Beside them are the waits for what the service does after its answer.
"""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

import tuneship.contract.resources  # noqa: F401 - loads every file that declares operations
from tuneship.client import Client
from tuneship.contract.datasets import Dataset, DatasetStatus
from tuneship.contract.deployments import Deployment, DeploymentStatus
from tuneship.contract.jobs import ENDED, Job
from tuneship.contract.operation import DECLARED, Operation
from tuneship.prefect.calls import CALL_DEADLINE_S, POLL_TRIES, as_task, call_once
from tuneship.prefect.credentials import TuneshipCredentials

P = ParamSpec("P")
R = TypeVar("R")

POLL_SECONDS = 2.0
STILL_COMING = frozenset({DeploymentStatus.CREATING, DeploymentStatus.UPDATING})


class NotInTime(Exception):
    """The deadline of a wait passed before its end came."""


def task_of(operation: Operation[P, R]) -> Task[Concatenate[TuneshipCredentials, P], R]:
    """A task that calls one operation at the service of the credentials.

    A change carries the same idempotency key in every try of its task run, so a try whose answer was lost is not
    carried out twice.
    """

    @functools.wraps(operation.declaration)
    def call(credentials: TuneshipCredentials, *args: P.args, **kwargs: P.kwargs) -> R:
        with credentials.get_client() as client:
            within = client.with_options(ends_at=time.monotonic() + CALL_DEADLINE_S)
            return call_once(within, operation, *args, **kwargs)

    declared = inspect.signature(operation.declaration)
    first = inspect.Parameter(
        "credentials", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=TuneshipCredentials
    )
    parameters = [first, *declared.parameters.values()]
    call.__signature__ = declared.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return as_task(operation, call)


@functools.cache
def _tasks() -> dict[str, Task[..., Any]]:
    return {one.name: task_of(one) for one in DECLARED}


def __getattr__(name: str) -> Task[..., Any]:
    """The task of an operation."""
    found = _tasks().get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    """The names of this module, those of the operations among them."""
    return sorted({*globals(), *_tasks()})


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{job_id}")
def wait_for_job(
    credentials: TuneshipCredentials,
    job_id: str,
    deadline_seconds: float = 7 * 86400.0,
    poll_seconds: float = POLL_SECONDS,
) -> Job:
    """Wait until a job has ended, whatever its end. Raises `NotInTime`; the job goes on."""
    return _wait(
        credentials,
        lambda client: client.jobs.get(job_id),
        lambda job: job.status in ENDED,
        deadline_seconds,
        poll_seconds,
    )


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{dataset_id}")
def wait_for_dataset(
    credentials: TuneshipCredentials,
    dataset_id: str,
    deadline_seconds: float = 3600.0,
    poll_seconds: float = POLL_SECONDS,
) -> Dataset:
    """Wait until a dataset is processed or has failed. Raises `NotInTime`."""
    ended = (DatasetStatus.PROCESSED, DatasetStatus.FAILED)
    return _wait(
        credentials,
        lambda client: client.datasets.get(dataset_id),
        lambda dataset: dataset.status in ended,
        deadline_seconds,
        poll_seconds,
    )


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{deployment_id}")
def wait_for_deployment(
    credentials: TuneshipCredentials,
    deployment_id: str,
    deadline_seconds: float = 600.0,
    poll_seconds: float = POLL_SECONDS,
) -> Deployment:
    """Wait until a deployment runs, or never will. Raises `NotInTime`."""
    return _wait(
        credentials,
        lambda client: client.deployments.get(deployment_id),
        lambda deployment: deployment.status not in STILL_COMING,
        deadline_seconds,
        poll_seconds,
    )


def _wait(
    credentials: TuneshipCredentials,
    read: Callable[[Client], R],
    is_over: Callable[[R], bool],
    deadline_seconds: float,
    poll_seconds: float,
) -> R:
    ends_at = time.monotonic() + deadline_seconds
    with credentials.get_client() as client:
        patient = client.with_options(tries=POLL_TRIES, ends_at=ends_at)
        while not is_over(seen := read(patient)):
            if time.monotonic() + poll_seconds > ends_at:
                raise NotInTime(f"not ended within {deadline_seconds:g} s")
            time.sleep(poll_seconds)
        return seen
