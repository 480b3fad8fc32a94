"""How a task creates something exactly once: the retry policy, a stored result, and an `Idempotency-Key` of the run.

The stored result spares a second process with the same `run_key` the call; the key closes the gap between the call and
the store. Results are JSON and hold ids and numbers, never text of a dataset.
"""

from datetime import timedelta
from typing import Any

from prefect.context import TaskRunContext

from tasks.api import RETRIES, api, idempotency_key
from tuneship.client import Client


def _by_run_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """One result for one run, create and service: an id of one service means nothing to another."""
    settings = api().settings
    content = {name: str(value) for name, value in parameters.items()}
    service = [settings.url, settings.client_id]
    return idempotency_key(str(parameters["run_key"]), context.task.name, [service, content])


CREATES: dict[str, Any] = {
    **RETRIES,
    "persist_result": True,
    "result_serializer": "json",
    "cache_key_fn": _by_run_key,
    "cache_expiration": timedelta(hours=24),  # as long as the service keeps idempotency keys
}
"""Options of every task that creates; such a task takes the argument `run_key`."""


def once(run_key: str, step: str, content: Any) -> Client:
    """The client whose next create is made only once for this run, step and content."""
    return api().with_options(idempotency_key=idempotency_key(run_key, step, content))
