"""What a resource of a client can do: descriptors that turn a declared operation into a typed method.

The same descriptor serves `Client` and `AsyncClient`. Next: `resources.py` lists them.
"""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from tuneship.client.pages import Following, Paged, by_offset, named
from tuneship.contract.generation import GeneratedText, Generation
from tuneship.contract.operation import Operation

if TYPE_CHECKING:
    from tuneship.client.clients import AsyncClient, Client

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class SyncResource:
    """A group of verbs on a `Client`."""

    client: "Client"


@dataclass(frozen=True)
class AsyncResource:
    """A group of verbs on an `AsyncClient`."""

    client: "AsyncClient"


class Verb(Generic[P, R]):
    """`jobs.create` and the like: an operation, callable on a client's resource."""

    def __init__(self, operation: Operation[P, R]) -> None:
        """Name the operation that the verb stands for."""
        self.operation = operation

    @overload
    def __get__(self, resource: "SyncResource", owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, resource: "AsyncResource", owner: type) -> Callable[P, Awaitable[R]]: ...
    def __get__(self, resource: "SyncResource | AsyncResource", owner: type) -> Callable[P, Any]:
        """Bind to the resource's client."""
        client: Any = resource.client

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.call(self.operation, *args, **kwargs)

        return call


class Streamed(Generic[P]):
    """`deployments.stream`: the operation's text as it is written, piece by piece, at the end the whole reply."""

    def __init__(self, operation: Operation[P, Generation]) -> None:
        """Name the operation; its body's `stream` is set by the verb."""
        self.operation = operation

    @overload
    def __get__(
        self, resource: "SyncResource", owner: type
    ) -> Callable[P, Generator[GeneratedText | Generation]]: ...
    @overload
    def __get__(
        self, resource: "AsyncResource", owner: type
    ) -> Callable[P, AsyncGenerator[GeneratedText | Generation]]: ...
    def __get__(self, resource: "SyncResource | AsyncResource", owner: type) -> Callable[P, Any]:
        """Bind to the resource's client."""
        client: Any = resource.client

        def stream(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.stream(self.operation, *args, **kwargs)

        return stream


class Pages(Generic[P, T]):
    """`jobs.iterate` and the like: every entry of a list operation, its pages fetched as they are needed.

    Takes the operation's own parameters: `limit` is the size of a page, `offset` where the walk starts.
    """

    def __init__(
        self,
        operation: Operation[P, R],
        entries: Callable[[R], Sequence[T]],
        following: Following = by_offset,
    ) -> None:
        """Say where a page's entries stand, and how the next page is asked for."""
        self._paged: Paged[Any, T] = Paged(operation, entries, following)

    @overload
    def __get__(self, resource: "SyncResource", owner: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, resource: "AsyncResource", owner: type) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, resource: "SyncResource | AsyncResource", owner: type) -> Callable[P, Any]:
        """Bind to the resource's client."""
        client: Any = resource.client

        def walk(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.walk(self._paged, named(self._paged.operation, args, kwargs))

        return walk
