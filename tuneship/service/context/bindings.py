"""Which handler answers which declared operation. `@serves` keeps their signatures in step by type."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from tuneship.contract.operation import Operation
from tuneship.service.common.streaming import Stream
from tuneship.service.context.context import Context

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class BoundOperation:
    """An operation and what happens."""

    operation: Operation[..., Any]
    handler: Callable[..., Any]
    is_async: bool = False
    """It runs on the event loop."""
    is_long: bool = False
    """It reads or writes whole files: it has threads of its own, and a client may have a few under way."""


# By operation name; a guard test compares it with what is declared.
SERVED: dict[str, BoundOperation] = {}


def serves(
    operation: Operation[P, R],
) -> Callable[[Callable[Concatenate[Context, P], R]], Callable[Concatenate[Context, P], R]]:
    """Bind a handler that runs in a worker thread and owns one transaction."""

    def bind(handler: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
        SERVED[operation.name] = BoundOperation(operation, handler)
        return handler

    return bind


def serves_long(
    operation: Operation[P, R],
) -> Callable[[Callable[Concatenate[Context, P], R]], Callable[Concatenate[Context, P], R]]:
    """The same for a handler that works on whole files, for seconds or minutes."""

    def bind(handler: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
        SERVED[operation.name] = BoundOperation(operation, handler, is_long=True)
        return handler

    return bind


def serves_or_streams(
    operation: Operation[P, R],
) -> Callable[
    [Callable[Concatenate[Context, P], R | Stream]],
    Callable[Concatenate[Context, P], R | Stream],
]:
    """The same for a handler that answers with one object or with a stream of frames, as the caller asks."""

    def bind(
        handler: Callable[Concatenate[Context, P], R | Stream],
    ) -> Callable[Concatenate[Context, P], R | Stream]:
        SERVED[operation.name] = BoundOperation(operation, handler)
        return handler

    return bind


def serves_encoded(
    operation: Operation[P, R],
) -> Callable[[Callable[Concatenate[Context, P], bytes]], Callable[Concatenate[Context, P], bytes]]:
    """Bind a handler that renders the reply itself, as JSON: for answers too long for models."""

    def bind(
        handler: Callable[Concatenate[Context, P], bytes],
    ) -> Callable[Concatenate[Context, P], bytes]:
        SERVED[operation.name] = BoundOperation(operation, handler)
        return handler

    return bind


def serves_async(
    operation: Operation[P, R],
) -> Callable[
    [Callable[Concatenate[Context, P], Awaitable[R | Stream]]],
    Callable[Concatenate[Context, P], Awaitable[R | Stream]],
]:
    """Bind a handler that runs on the event loop: for waiting, not for work. It may answer with a stream."""

    def bind(
        handler: Callable[Concatenate[Context, P], Awaitable[R | Stream]],
    ) -> Callable[Concatenate[Context, P], Awaitable[R | Stream]]:
        SERVED[operation.name] = BoundOperation(operation, handler, is_async=True)
        return handler

    return bind
