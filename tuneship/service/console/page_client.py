"""The client of the pages: it carries out operations inside the service, as the signed-in key, without HTTP."""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.declaring.verbs import Asynchronous
from tuneship.contract.resources import Api
from tuneship.service.access.console_sessions import Session
from tuneship.service.console.installation_facts import InstallationFacts
from tuneship.service.context.arguments import path_arguments, validated
from tuneship.service.context.context import Context
from tuneship.service.context.operation_calls import (
    Arguments,
    Departure,
    OperationCalls,
    WholeAnswer,
)
from tuneship.store.records.idempotency import Key

P = ParamSpec("P")
R = TypeVar("R")
# The most that a page offers to choose from: the newest.
MOST_LISTED = 100


@dataclass(frozen=True)
class Visit:
    """One request for a page: who makes it, and how its operations are called."""

    session: Session
    calls: Mapping[str, OperationCalls]
    # Makes the context of a call, by the operation and the id in its path.
    make_context: Callable[[Operation[..., Any], str | None], Context]
    departure: Departure
    installation: InstallationFacts
    # What an open page has read before: to read it again adds no audit entry. None for a page that is opened.
    known: set[tuple[str, str | None, str | None]] | None = None
    # What a page keeps from one look of a stream to the next, so that it reads only what is new.
    memory: dict[Any, Any] = field(default_factory=dict[Any, Any])


class PageClient(Api[Asynchronous], Asynchronous):
    """A client of every resource. An operation is read and checked as strictly as one from the network."""

    def __init__(self, visit: Visit) -> None:
        """Call as the person who makes the visit."""
        self._bind_resources(self)
        self.visit = visit

    def may(self, operation: Operation[..., Any]) -> bool:
        """Whether the session has the operation's scope, so that a page can leave out what it may not show."""
        return operation.scope in self.visit.session.principal.scopes

    async def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `ApiError`."""
        bound = inspect.signature(operation.declaration).bind(*args, **kwargs)
        return await self.carry_out(operation, bound.arguments)

    async def carry_out(
        self, operation: Operation[P, R], given: Mapping[str, Any], key: Key | None = None
    ) -> R:
        """Call an operation with arguments by name. Raises `ApiError`."""
        identifier = next((str(given[name]) for name in operation.path_parameters), None)
        return await self.carry_out_read(
            operation, identifier, lambda _: _reading(operation, given, key)
        )

    async def carry_out_read(
        self,
        operation: Operation[P, R],
        identifier: str | None,
        read: Callable[[Context], AbstractAsyncContextManager[Arguments]],
    ) -> R:
        """Call an operation whose arguments are read when the caller may make the call. Raises `ApiError`."""
        visit = self.visit
        context = visit.make_context(operation, identifier)
        context.audit_facts.known = visit.known
        answer = await visit.calls[operation.name].carry_out(
            context, read(context), visit.departure
        )
        if not isinstance(answer, WholeAnswer):
            raise TypeError(f"{operation.name} answers with a stream")
        return operation.reply_type.validate_json(answer.body)


@asynccontextmanager
async def _reading(
    operation: Operation[..., Any], given: Mapping[str, Any], key: Key | None
) -> AsyncGenerator[Arguments]:
    values = dict(given)
    body: dict[str, Any] = {}
    if operation.body_parameter is not None:
        name, model = operation.body_parameter
        sent: BaseModel = values.pop(name)
        body[name] = validated(
            model, sent.model_dump(mode="json", by_alias=True, exclude_unset=True)
        )
    path = path_arguments(operation, {name: values.pop(name) for name in operation.path_parameters})
    query = validated(operation.query_model, values)
    fields = {name: getattr(query, name) for name in operation.query_model.model_fields}
    yield Arguments({**fields, **path, **body}, key)
