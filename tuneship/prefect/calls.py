"""How a task calls the service: retries for Prefect, one idempotency key for all tries, a name for the run."""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import exponential_backoff

from tuneship.client import ApiError, Client, DeadlineExceeded, TuneshipError
from tuneship.contract.declaring.operation import Operation

P = ParamSpec("P")
R = TypeVar("R")

# For each try of a task, with all its requests, pages and pauses: the longest `Retry-After` (300 s)
# and two slow answers fit in. The client enforces it, because Prefect's `timeout_seconds` stops a
# synchronous task in the main thread only, by an alarm that interrupts whatever runs, and its error
# does not say that the service may have carried out the request.
CALL_DEADLINE_S = 900.0
# For each request of a task that waits: Prefect does not retry such a task as a whole, so its
# client makes as many tries as the other tasks do in all.
POLL_TRIES = 6


def transient(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition: the service says that a retry may help, or no whole answer came.

    Prefect fixes its pauses before the run, so a `Retry-After` is waited for here.
    """
    try:
        state.result()
    except DeadlineExceeded:
        return False
    except ApiError as error:
        if error.retryable and error.retry_after:
            time.sleep(error.retry_after)
        return error.retryable
    except TuneshipError as error:
        return error.retryable
    except Exception:  # noqa: BLE001 - any other error is a bug of the flow, never worth a retry
        return False
    return False


# Options of every task that calls the service: 3 tries of 2 requests each, with jitter.
RETRIES: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": exponential_backoff(backoff_factor=0.5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": transient,
}


def idempotency_key(run_key: str, step: str, content: Any = None) -> str:
    """A key for one create of one run; it is the same after a crash, so the service carries the create out once."""
    text = json.dumps([run_key, step, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def call_once(client: Client, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call an operation with the idempotency key of the task run, which stays the same in every try."""
    run = TaskRunContext.get()
    if operation.takes_idempotency_key and run is not None:
        key = idempotency_key(str(run.task_run.id), operation.name)
        client = client.with_options(idempotency_key=key)
    return client.call(operation, *args, **kwargs)


def as_task(operation: Operation[..., Any], call: Callable[P, R]) -> Task[P, R]:
    """A task with the operation's name that makes this call."""
    # The name in the runs list, e.g. `get-job-ft_4k2m...`; Prefect fills in the arguments.
    run_name = "-".join(
        [operation.name.replace("_", "-"), *(f"{{{name}}}" for name in operation.path_parameters)]
    )
    # Prefect writes no reply anywhere: it may hold a secret, a prompt or a completion.
    return Task(
        call,
        name=operation.name,
        task_run_name=run_name,
        cache_policy=NO_CACHE,
        persist_result=False,
        **RETRIES,
    )
