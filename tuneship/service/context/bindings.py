"""Binds handlers to the declared operations. `@serves` keeps their signatures in step by type."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from tuneship.contract.declaring.operation import Operation
from tuneship.service.answers.downloads import Download
from tuneship.service.answers.streaming import Stream
from tuneship.service.context.context import Context

P = ParamSpec("P")
R = TypeVar("R")
# Pools of `RequestThreads` that no upload needs.
OwnThreads = Literal["conversions", "validations"]


@dataclass(frozen=True)
class BoundOperation:
    """An operation and its handler."""

    operation: Operation[..., Any]
    handler: Callable[..., Any]
    # It runs on the event loop.
    is_async: bool = False
    # It reads or writes whole files: it has threads of its own, and a client may have a few in flight.
    is_long: bool = False
    # The pool in which it may work for minutes: it ends soon after its caller has disconnected.
    own_threads: OwnThreads | None = None


# By operation name; a guard test compares it with the declared operations.
SERVED: dict[str, BoundOperation] = {}


class Bind(Protocol[P, R]):
    """A decorator for handlers with the operation's parameters, by the kinds of answers that they may give."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], R], /
    ) -> Callable[Concatenate[Context, P], R]: ...

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], bytes], /
    ) -> Callable[Concatenate[Context, P], bytes]: ...

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], bytes | Download], /
    ) -> Callable[Concatenate[Context, P], bytes | Download]: ...

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], R | Stream], /
    ) -> Callable[Concatenate[Context, P], R | Stream]: ...

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], Awaitable[R | Stream]], /
    ) -> Callable[Concatenate[Context, P], Awaitable[R | Stream]]: ...

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], Awaitable[bytes]], /
    ) -> Callable[Concatenate[Context, P], Awaitable[bytes]]: ...

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], Awaitable[Download]], /
    ) -> Callable[Concatenate[Context, P], Awaitable[Download]]: ...


def serves(
    operation: Operation[P, R],
    *,
    is_long: bool = False,
    own_threads: OwnThreads | None = None,
    served: dict[str, BoundOperation] = SERVED,
) -> Bind[P, R]:
    """Bind a handler to an operation, which is then listed in `served`.

    A plain function runs in a worker thread and owns one transaction; with `is_long` it may work on whole files, for
    seconds; with `own_threads` for minutes, but it looks at `Context.left` then. A coroutine function runs on the event
    loop: for waiting, not for work. Instead of the reply a handler may return a stream, an archive, or the reply as
    JSON, where it is too long for models.
    """

    def bind(handler: Any) -> Any:
        is_async = inspect.iscoroutinefunction(handler)
        served[operation.name] = BoundOperation(operation, handler, is_async, is_long, own_threads)
        return handler

    return bind
