"""Makes Prefect tasks from declared operations, so that an operation needs no task of its own to be used in a flow.

    from tuneship.contract import webhooks
    test_webhook = task_of(webhooks.send_test_event)

    @flow
    def check_receiver(webhook_id: str) -> None:
        test_webhook(webhook_id, WebhookTest())

These tasks know their service by themselves (`tasks/api.py`); those of `tuneship/prefect/tasks.py`, for flows outside
this project, are given it. Tasks that do more are written by hand, in `tasks/<resource>.py`: waits, uploads, creates
that happen once per release.
"""

import functools
from typing import ParamSpec, TypeVar

from prefect import Task

from tasks.api import api
from tuneship.contract.operation import Operation
from tuneship.contract.verbs import Pages
from tuneship.prefect.calls import as_task, call_once

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
        return call_once(api(), operation, *args, **kwargs)

    return as_task(operation, call)


def task_of_pages(pages: Pages[P, T]) -> Task[P, list[T]]:
    """A task that lists every entry, all pages: `task_of_pages(Jobs.iterate)`."""
    operation = pages.paged.operation

    @functools.wraps(operation.declaration)
    def call(*args: P.args, **kwargs: P.kwargs) -> list[T]:
        given = {"limit": LARGEST_PAGE} | pages.arguments(*args, **kwargs)
        return list(api().walk(pages.paged, given))

    return as_task(operation, call)
