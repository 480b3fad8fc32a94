"""How a task creates something exactly once: a stored result, an `Idempotency-Key` of the run, and tags to find it by.

The stored result spares a second process with the same `run_key` the call; the key closes the gap between the call and
the store; the tags find what was made when both are a day old, or lost. Results are JSON and hold ids and numbers,
never text of a dataset.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from prefect import get_run_logger
from prefect.context import TaskRunContext
from pydantic import BaseModel

from tasks.api import CALL_DEADLINE_S, RETRIES, api, idempotency_key
from tuneship.client import ApiError, Client

# On everything that a run creates and that can carry tags: its run key (§2: at most 512
# characters).
RUN_TAG = "pipeline_run"
# Beside it: which create of that run it came from, by the digest that is its idempotency key,
# too.
CREATE_TAG = "pipeline_create"
# How a server refuses that lists nothing, or not by tags.
NO_SUCH_LIST = (400, 404, 405, 422, 501)


def _by_run_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """One result for one run, create and service: an id of one service means nothing to another."""
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
    """The client whose next create is made only once for this run, step and content."""
    return api(deadline_s).with_options(idempotency_key=idempotency_key(run_key, step, content))


def run_tag(run_key: str) -> dict[str, str]:
    """What is on everything that this run creates."""
    return {RUN_TAG: run_key[:512]}


def marks(run_key: str, step: str, content: Any) -> dict[str, str]:
    """The tags of what this run creates in this step of this content."""
    return {**run_tag(run_key), CREATE_TAG: idempotency_key(run_key, step, content)}


class Tagged(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str:
        """Of the resource."""
        ...

    @property
    def tags(self) -> Mapping[str, str]:
        """Its own."""
        ...


Item = TypeVar("Item", bound=Tagged)
Created = TypeVar("Created", bound=BaseModel)


def tagged(listed: Iterable[Item], tags: Mapping[str, str]) -> Iterator[Item]:
    """Those of a list that carry these tags: a server may know no filter."""
    return (one for one in listed if tags.items() <= one.tags.items())


def made_before(listed: Iterable[Item], tags: Mapping[str, str]) -> list[Item]:
    """The same for a task that would create it otherwise. Empty where the server lists nothing: the key is left."""
    try:
        found = list(tagged(listed, tags))
    except ApiError as error:
        if error.status not in NO_SUCH_LIST:
            raise
        get_run_logger().warning("what this run made before cannot be listed (%d)", error.status)
        return []
    for one in found:
        get_run_logger().info("%s was made by this run before", one.id)
    return found


def as_created(form: type[Created], whole: BaseModel) -> Created:
    """What exists, in the form in which its create answers."""
    return form.model_validate(whole.model_dump(include=set(form.model_fields)))
