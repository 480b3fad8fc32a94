"""The verbs of a client's resources: descriptors that turn a declared operation into a typed method.

A resource class such as `Jobs` stands beside its operations in `tuneship/contract/jobs.py`, and both clients use it:
it is generic over the kind of its client, so `client.jobs.get` of a `Client` returns a `Job`, and that of an
`AsyncClient` an awaitable of one. Type checkers and editors see this through the overloads of `__get__`.
"""

# The verbs are written out, one line each, because no type checker can derive a class's attributes from a list of
# operations; a generated stub file would be a second copy. A guard test compares them with the declared operations.

import inspect
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from tuneship.contract.declaring.operation import Operation
from tuneship.contract.declaring.pages import NextPage, Paged, by_offset
from tuneship.contract.generation import GeneratedText, Generation

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Form = TypeVar("Form")
Form_contra = TypeVar("Form_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Blocking:
    """A client whose calls return their replies."""


class Asynchronous:
    """A client whose calls are awaited."""


# Covariant, so that a resource of either client is a `Resource[Blocking | Asynchronous]`.
C_co = TypeVar("C_co", bound=Blocking | Asynchronous, covariant=True)


@dataclass(frozen=True)
class Resource(Generic[C_co]):
    """A group of verbs, bound to one client."""

    client: C_co


class _OperationVerb(ABC, Generic[P, R]):
    """Something that is called as a method of a resource, and calls one operation."""

    def __init__(self, operation: Operation[P, R]) -> None:
        """Name the operation that the verb calls."""
        self.operation = operation

    @abstractmethod
    def _call(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the operation on a blocking client, or return the awaitable of an asynchronous client."""

    @overload
    def __get__(self, resource: None, owner: type) -> Self: ...
    @overload
    def __get__(self, resource: Resource[Blocking], owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(
        self, resource: Resource[Asynchronous], owner: type
    ) -> Callable[P, Awaitable[R]]: ...
    def __get__(self, resource: Resource[Any] | None, owner: type) -> Any:
        """Bind the verb to the resource's client; on the class, it is the verb itself."""
        # Read from the class, by what lists the verbs: there is no client to call.
        return self if resource is None else partial(self._call, resource.client)


class Verb(_OperationVerb[P, R]):
    """`jobs.create` and the like: an operation that is called as a method of a resource."""

    def _call(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client.call(self.operation, *args, **kwargs)


class WaitVerb(_OperationVerb[P, R]):
    """`evaluations.wait` and the like: calls an operation repeatedly until its reply reports the end."""

    def __init__(self, operation: Operation[P, R], is_over: Callable[[R], bool]) -> None:
        """`is_over`: whether a reply reports the end."""
        super().__init__(operation)
        self.is_over = is_over

    def _call(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client.until(self.operation, self.is_over, *args, **kwargs)


class RowFrame(Protocol):
    """The part of a pandas frame that an upload uses."""

    @property
    def columns(self) -> Any: ...
    def itertuples(self, *args: Any, **kwargs: Any) -> Any: ...


class RowDataset(Protocol):
    """The attributes by which an upload recognizes a Hugging Face dataset."""

    @property
    def column_names(self) -> Any: ...
    def iter(self, batch_size: int) -> Any: ...


AnyPath = str | PathLike[str]
# What an upload is made of: a path, an open file of JSON Lines, a pandas frame, a Hugging Face dataset, or rows.
Source = AnyPath | BinaryIO | RowFrame | RowDataset | Iterable[Mapping[str, Any]]
# The column of each field, e.g. `{"instruction": "question"}`.
Columns = Mapping[str, str]


class Uploading(Protocol[Form_contra, R_co]):
    """An upload as a method: it takes a form, and the source of the file."""

    def __call__(self, form: Form_contra, file: Source, columns: Columns | None = None) -> R_co: ...


class UploadVerb(Verb[..., R], Generic[Form, R]):
    """`datasets.upload` and the like: converts the caller's source to JSON Lines and sends it."""

    @overload
    def __get__(self, resource: None, owner: type) -> Self: ...
    @overload
    def __get__(self, resource: Resource[Blocking], owner: type) -> Uploading[Form, R]: ...
    @overload
    def __get__(
        self, resource: Resource[Asynchronous], owner: type
    ) -> Uploading[Form, Awaitable[R]]: ...
    def __get__(self, resource: Resource[Any] | None, owner: type) -> Any:
        """Bind the verb to the resource's client."""
        if resource is None:
            return self
        client = resource.client

        def upload(form: Form, file: Source, columns: Columns | None = None) -> Any:
            return client.upload(self.operation, form, file, columns)

        return upload


class AdapterVerb(Verb[..., R], Generic[Form, R]):
    """`models.import_`: sends an adapter's folder."""

    @overload
    def __get__(self, resource: None, owner: type) -> Self: ...
    @overload
    def __get__(
        self, resource: Resource[Blocking], owner: type
    ) -> Callable[[Form, AnyPath], R]: ...
    @overload
    def __get__(
        self, resource: Resource[Asynchronous], owner: type
    ) -> Callable[[Form, AnyPath], Awaitable[R]]: ...
    def __get__(self, resource: Resource[Any] | None, owner: type) -> Any:
        """Bind the verb to the resource's client."""
        if resource is None:
            return self
        client = resource.client

        def send(form: Form, folder: AnyPath) -> Any:
            return client.send_folder(self.operation, form, folder)

        return send


class DownloadVerb(Verb[..., Any], Generic[P]):
    """`models.download`: writes the received archive into a new folder, and returns the folder."""

    def __init__(self, operation: Operation[P, bytes]) -> None:
        """Name the operation that answers with an archive."""
        super().__init__(operation)

    @overload
    def __get__(self, resource: None, owner: type) -> Self: ...
    @overload
    def __get__(
        self, resource: Resource[Blocking], owner: type
    ) -> Callable[Concatenate[AnyPath, P], Path]: ...
    @overload
    def __get__(
        self, resource: Resource[Asynchronous], owner: type
    ) -> Callable[Concatenate[AnyPath, P], Awaitable[Path]]: ...
    def __get__(self, resource: Resource[Any] | None, owner: type) -> Any:
        """Bind the verb to the resource's client."""
        if resource is None:
            return self
        client = resource.client

        def download(folder: AnyPath, *args: P.args, **kwargs: P.kwargs) -> Any:
            return client.download(folder, self.operation, *args, **kwargs)

        return download


class Streamed(Generic[P]):
    """`deployments.stream`: yields pieces of text while they are generated, and the whole reply at the end."""

    def __init__(self, operation: Operation[P, Generation]) -> None:
        """Name the operation; the verb sets `stream` in its body."""
        self.operation = operation

    @overload
    def __get__(
        self, resource: Resource[Blocking], owner: type
    ) -> Callable[P, Generator[GeneratedText | Generation]]: ...
    @overload
    def __get__(
        self, resource: Resource[Asynchronous], owner: type
    ) -> Callable[P, AsyncGenerator[GeneratedText | Generation]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Any:
        """Bind the verb to the resource's client."""
        client = resource.client

        def stream(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.stream(self.operation, *args, **kwargs)

        return stream


class Pages(Generic[P, T]):
    """`jobs.iterate` and the like: yields every entry of a list operation and fetches pages as they are needed.

    It takes the operation's own parameters: `limit` is the size of a page, `offset` is where it starts.
    """

    def __init__(
        self,
        operation: Operation[P, R],
        entries: Callable[[R], Sequence[T]],
        next_page: NextPage = by_offset,
    ) -> None:
        """Say which field of a page holds its entries, and how the next page is requested."""
        self.paged: Paged[Any, T] = Paged(operation, entries, next_page)

    @overload
    def __get__(self, resource: None, owner: type) -> Self: ...
    @overload
    def __get__(self, resource: Resource[Blocking], owner: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(
        self, resource: Resource[Asynchronous], owner: type
    ) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, resource: Resource[Any] | None, owner: type) -> Any:
        """Bind the verb to the resource's client; on the class, it is the verb itself."""
        if resource is None:
            return self
        client = resource.client

        def walk(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.walk(self.paged, self.arguments(*args, **kwargs))

        return walk

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """The arguments by name: a walk replaces single ones from page to page."""
        signature = inspect.signature(self.paged.operation.declaration)
        return signature.bind(*args, **kwargs).arguments
