"""How a task creates something exactly once: a stored result, an `Idempotency-Key` of the run, and tags to find it by.

With the stored result, a second process with the same `run_key` needs no call; the key covers a crash between the call
and the storing; the tags find the resource when both are older than a day, or lost. Results are JSON and hold ids and
numbers, never text of a dataset.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from prefect import get_run_logger
from prefect.context import TaskRunContext
from pydantic import BaseModel

from tuneship.client import ApiError, Client
from tuneship.prefect.calls import CALL_DEADLINE_S, RETRIES, idempotency_key
from tuneship.prefect.connection import api

# Tag with the run key, on everything that a run creates and that can carry tags (§2: at most 512
# characters).
RUN_TAG = "pipeline_run"
# Tag with the create of that run that made it: the digest that is its idempotency key, too.
CREATE_TAG = "pipeline_create"
# Statuses of a server that cannot list, or not by tags.
NO_SUCH_LIST = (400, 404, 405, 422, 501)


def _by_run_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """The cache key of a create: its run, arguments and service, since ids are valid at one service only."""
    settings = api().settings
    content = {name: str(value) for name, value in parameters.items()}
    service = [settings.url, settings.client_id]
    return idempotency_key(str(parameters["run_key"]), context.task.name, [service, content])


# Options of every task that creates; such a task takes the argument `run_key`.
CREATES: dict[str, Any] = {
    **RETRIES,
    "persist_result": True,
    "result_serializer": "json",
    "cache_key_fn": _by_run_key,
    "cache_expiration": timedelta(hours=24),  # as long as the service keeps idempotency keys
}


def once(run_key: str, step: str, content: Any, deadline_s: float = CALL_DEADLINE_S) -> Client:
    """A client whose next create happens only once for this run, step and content."""
    return api(deadline_s).with_options(idempotency_key=idempotency_key(run_key, step, content))


def run_tag(run_key: str) -> dict[str, str]:
    """The tag of everything that this run creates."""
    return {RUN_TAG: run_key[:512]}


def marks(run_key: str, step: str, content: Any) -> dict[str, str]:
    """The tags of the resource that this run creates in this step from this content."""
    return {**run_tag(run_key), CREATE_TAG: idempotency_key(run_key, step, content)}


class Tagged(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str:
        """The resource's id."""
        ...

    @property
    def tags(self) -> Mapping[str, str]:
        """The resource's tags."""
        ...


Item = TypeVar("Item", bound=Tagged)
Created = TypeVar("Created", bound=BaseModel)


def tagged(listed: Iterable[Item], tags: Mapping[str, str]) -> Iterator[Item]:
    """The items of a list that carry these tags; checked here, because a server may ignore the filter."""
    return (item for item in listed if tags.items() <= item.tags.items())


def made_before(listed: Iterable[Item], tags: Mapping[str, str]) -> list[Item]:
    """The tagged items that an earlier process of this run has created.

    Empty when the server cannot list; then the idempotency key alone prevents a second one.
    """
    try:
        items = list(tagged(listed, tags))
    except ApiError as error:
        if error.status not in NO_SUCH_LIST:
            raise
        get_run_logger().warning(
            "resources that this run has created cannot be listed (status %d)", error.status
        )
        return []
    for item in items:
        get_run_logger().info("%s was created by this run before", item.id)
    return items


def as_created(form: type[Created], whole: BaseModel) -> Created:
    """An existing resource in the form of the answer to its create."""
    return form.model_validate(whole.model_dump(include=set(form.model_fields)))
