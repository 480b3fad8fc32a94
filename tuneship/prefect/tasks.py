"""A Prefect task for each operation of the API, by its name: `from tuneship.prefect.tasks import create_job, get_job`.

    @flow
    def check_receiver(webhook_id: str) -> None:
        send_test_event(webhook_id, WebhookTest())

Parameters and reply are those of the operation. Each task also takes `credentials`, the block of the service to call;
without it, it calls the service of `connection.py`. A new operation needs no line here. Next: `waits.py` has the waits
for what the service does after its answer; tasks that do more, such as creates that happen once for a release, are
written by hand in the `tasks/` of the project.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from prefect import Task

import tuneship.contract.resources  # noqa: F401  # pyright: ignore[reportUnusedImport] - loads every file that declares operations
from tuneship.client import Client
from tuneship.contract.declaring.operation import DECLARED, Operation
from tuneship.contract.declaring.verbs import Pages
from tuneship.prefect.calls import as_task, call_once
from tuneship.prefect.connection import connected
from tuneship.prefect.credentials import TuneshipCredentials

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
LARGEST_PAGE = 100


def task_of(operation: Operation[P, R]) -> Task[P, R]:
    """A task that calls one operation; it has the operation's name, parameters and reply, and takes `credentials`.

    A change carries the same idempotency key in every try of its task run, so a try whose answer was lost is not
    carried out twice.
    """

    def call(client: Client, *args: P.args, **kwargs: P.kwargs) -> R:
        return call_once(client, operation, *args, **kwargs)

    return _task_with_credentials(operation, call)


def task_of_pages(pages: Pages[P, T]) -> Task[P, list[T]]:
    """A task that lists every entry, all pages: `task_of_pages(Jobs.iterate)`."""
    operation = pages.paged.operation

    def call(client: Client, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        given = {"limit": LARGEST_PAGE} | pages.arguments(*args, **kwargs)
        return list(client.walk(pages.paged, given))

    return _task_with_credentials(operation, call)


def _task_with_credentials(
    operation: Operation[..., Any], work: Callable[Concatenate[Client, P], R]
) -> Task[P, R]:
    """The task of an operation, with the parameters of `work` behind the client of the credentials."""

    @functools.wraps(operation.declaration)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # A parameter specification has no place for one more keyword, so it is taken out of the others.
        given = cast("dict[str, Any]", kwargs)
        with connected(given.pop("credentials", None)) as service:
            return work(service(), *args, **kwargs)

    declared = inspect.signature(operation.declaration)
    credentials = inspect.Parameter(
        "credentials",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=TuneshipCredentials | None,
    )
    call.__signature__ = declared.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=[*declared.parameters.values(), credentials]
    )
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
    """The names of this module, including those of the operations."""
    return sorted({*globals(), *_tasks()})
