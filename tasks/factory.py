"""Makes Prefect tasks from declared operations, so that an operation needs no task of its own to be used in a flow.

    from tuneship.contract import webhooks
    test_webhook = task_of(webhooks.send_test_event)

    @flow
    def check_receiver(webhook_id: str) -> None:
        test_webhook(webhook_id, WebhookTest())

Tasks that do more are written by hand, in `tasks/<resource>.py`: waits, uploads, creates that happen once per release.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from tasks.api import RETRIES, api, idempotency_key
from tuneship.contract.operation import Operation
from tuneship.contract.verbs import Pages

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
LARGEST_PAGE = 100


def task_of(operation: Operation[P, R]) -> Task[P, R]:
    """A task that calls one operation; it has the operation's name, parameters and reply.

    A change carries the same idempotency key in every try of its task run, so a try whose answer was lost is not
    carried out twice. To create something once per release, however often the flow is started, see `create_once.py`.
    """

    @functools.wraps(operation.declaration)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        client, run = api(), TaskRunContext.get()
        if operation.takes_idempotency_key and run is not None:
            key = idempotency_key(str(run.task_run.id), operation.name)
            client = client.with_options(idempotency_key=key)
        return client.call(operation, *args, **kwargs)

    return _as_task(operation, call)


def task_of_pages(pages: Pages[P, T]) -> Task[P, list[T]]:
    """A task that lists every entry, all pages: `task_of_pages(Jobs.iterate)`."""
    operation = pages.paged.operation

    @functools.wraps(operation.declaration)
    def call(*args: P.args, **kwargs: P.kwargs) -> list[T]:
        given = {"limit": LARGEST_PAGE} | pages.arguments(*args, **kwargs)
        return list(api().walk(pages.paged, given))

    return _as_task(operation, call)


def _as_task(operation: Operation[..., Any], call: Callable[P, R]) -> Task[P, R]:
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
