"""One operation, declared once: a typed function without a body is the whole contract of one API call.

    @operation("GET", "/v1/fine-tuning/jobs/{job_id}", scope="jobs:read")
    def get_job(job_id: JobId) -> Job:
        \"\"\"Fetch one job (§4.1).\"\"\"
        raise NotImplementedError

Its signature carries everything: names in the path template are path parameters, a pydantic model is the JSON body
(or the form, beside a `file: BinaryIO`), the rest is the query. `ParamSpec` hands the same signature to the client's
call and to the service's handler, so a disagreement is a type error. The body `raise NotImplementedError` is the one
form that mypy, pyright and ty all accept. Pure: no I/O here. Next: `contract/openapi.py`, `tuneship/client/`,
`tuneship/service/http/`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    get_type_hints,
)
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from tuneship.contract.errors import ApiError
from tuneship.contract.lines.strict_json import MAXIMUM_VALUES

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class FileMedia:
    """The media type of the file of a form."""

    name: str


JSON_LINES, TAR = FileMedia("application/jsonl"), FileMedia("application/x-tar")
# A folder as a tar archive.
TarFile = Annotated[BinaryIO, TAR]
Method = Literal["GET", "POST", "PATCH", "DELETE"]
# Optional request headers that only some operations read.
RequestHeader = Literal["If-Match", "Last-Event-ID", "X-Routing-Key", "X-API-Profile"]
# An error class with its first status, or with the status named.
PossibleError = type[ApiError] | tuple[type[ApiError], int]

JSON = "application/json"
# The status of a create, unless the service is set to answer 200.
CREATED = 201
# Every operation, in the order of declaration; the guard tests compare it with what is served.
DECLARED: list["Operation[..., Any]"] = []


@dataclass(frozen=True)
class Call:
    """One bound request: what goes on the wire, before any I/O."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: dict[str, Any] | None = None
    form: dict[str, Any] | None = None
    file: BinaryIO | None = None
    file_media: FileMedia = JSON_LINES
    # Where the archive of a reply is written; None keeps it in memory.
    sink: BinaryIO | None = None
    # The same for every try of the call, so that a repeated request changes nothing.
    idempotency_key: str | None = None


@dataclass(frozen=True)
class Example:
    """Requests and answers of an operation in the OpenAPI document.

    A test sends every request through the models and reads every reply back, so an example cannot drift from them.
    """

    # Bodies that may be sent, by name; the file of a form is its text.
    requests: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    reply: Any = None
    # Streamed answers, by media type.
    streams: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Operation(Generic[P, R]):
    """A declared API call with parameters `P` and reply `R`."""

    method: Method
    path: str
    scope: str
    status: int
    # Errors of this operation's own rules; those that follow from method, path and body are not repeated.
    errors: tuple[PossibleError, ...]
    headers: tuple[RequestHeader, ...]
    example: Example
    declaration: Callable[P, R]
    # The media types of its answer: JSON, or texts whose first one is the default.
    media: tuple[str, ...] = (JSON,)
    # Whether the API key alone names the caller, for programs that can send no other header.
    takes_key_alone: bool = False
    # The most values in its JSON body.
    most_values: int = MAXIMUM_VALUES

    @property
    def name(self) -> str:
        """The operation's name, e.g. `create_job`."""
        return self.declaration.__name__

    @property
    def resource(self) -> str:
        """The file of the contract that declares it, e.g. `jobs`."""
        return self.declaration.__module__.rpartition(".")[2]

    @property
    def is_creating(self) -> bool:
        """Whether it creates a resource; such an answer has a `Location`."""
        return self.status == CREATED

    @property
    def is_text(self) -> bool:
        """Whether its answer is a text instead of JSON."""
        return JSON not in self.media

    @property
    def is_form(self) -> bool:
        """Whether its body is a form with a file."""
        return self.file_parameter is not None

    @property
    def is_change(self) -> bool:
        """Whether it creates, changes or deletes something; generating and validating a file do not."""
        # Validating is a POST with a file that stores nothing.
        changes = self.method != "GET" and self.scope != "generate"
        return changes and (self.is_creating or not self.is_form)

    @property
    def takes_idempotency_key(self) -> bool:
        """Whether it takes an idempotency key: every change but DELETE, which can be repeated without one."""
        return self.is_change and self.method != "DELETE"

    @property
    def may_stream(self) -> bool:
        """Whether the caller may request a stream of events instead of one JSON answer."""
        body = self.body_parameter
        return "stream" in self.hints or (body is not None and "stream" in body[1].model_fields)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Parameter and reply types, with their `Annotated` limits."""
        return get_type_hints(self.declaration, include_extras=True)

    @cached_property
    def reply_type(self) -> "TypeAdapter[R]":
        """Validates and renders the reply."""
        return cast("TypeAdapter[R]", TypeAdapter(self.hints["return"]))

    @cached_property
    def path_parameters(self) -> tuple[str, ...]:
        """Names in the path template, in order; `{name:path}` takes the rest of the path."""
        return tuple(re.findall(r"{(\w+)(?::path)?}", self.path))

    @cached_property
    def body_parameter(self) -> tuple[str, type[BaseModel]] | None:
        """The name and model of the body or form, if the operation has one."""
        for name, hint in self.hints.items():
            if name != "return" and isinstance(hint, type) and issubclass(hint, BaseModel):
                return name, hint
        return None

    @cached_property
    def file_parameter(self) -> str | None:
        """The name of the file part of a form, if any."""
        return next(
            (name for name, hint in self.hints.items() if hint in (BinaryIO, TarFile)), None
        )

    @property
    def file_media(self) -> FileMedia:
        """The media type of that file."""
        return TAR if TarFile in self.hints.values() else JSON_LINES

    @property
    def is_download(self) -> bool:
        """Whether its reply is a tar archive instead of JSON."""
        return self.hints["return"] is bytes

    @cached_property
    def query_model(self) -> type[BaseModel]:
        """A model of the query, made from the signature; its defaults are the signature's."""
        taken = {*self.path_parameters, "return", self.file_parameter}
        if self.body_parameter:
            taken.add(self.body_parameter[0])
        defaults = inspect.signature(self.declaration).parameters
        fields = {
            name: (hint, defaults[name].default)
            for name, hint in self.hints.items()
            if name not in taken
        }
        # A misspelled parameter must be refused: an ignored filter would return everything.
        return create_model(
            f"{self.name}_query", __config__=ConfigDict(extra="forbid"), **cast("Any", fields)
        )

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Distribute the arguments over path, query, body and form; `None` in a query is not sent."""
        bound = inspect.signature(self.declaration).bind(*args, **kwargs)
        arguments = dict(bound.arguments)
        path = self.path
        for name in self.path_parameters:
            value = quote(str(arguments.pop(name)), safe="")
            # A function, since a text would be searched for backslashes.
            path = re.sub(rf"{{{name}(:path)?}}", lambda _, text=value: text, path)
        content: dict[str, Any] | None = None
        if self.body_parameter is not None:
            model: BaseModel = arguments.pop(self.body_parameter[0])
            # Omitted, null and default differ: what the caller did not set is not sent.
            content = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        file = arguments.pop(self.file_parameter) if self.file_parameter else None
        return Call(
            method=self.method,
            path=path,
            query=tuple(pair for item in arguments.items() for pair in _query_pairs(*item)),
            body=None if self.is_form else content,
            form=content if self.is_form else None,
            file=cast("BinaryIO | None", file),
            file_media=self.file_media,
        )


def _query_pairs(name: str, value: object) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, Mapping):  # tags[key]=value
        items = cast("Mapping[str, object]", value).items()
        return [(f"{name}[{key}]", str(item)) for key, item in items]
    if isinstance(value, list | tuple):
        return [(name, str(item)) for item in cast("list[object]", value)]
    # Python would write `True`, which is no boolean in a query.
    if isinstance(value, bool):
        return [(name, "true" if value else "false")]
    if isinstance(value, datetime):
        return [(name, value.astimezone(UTC).isoformat().replace("+00:00", "Z"))]
    return [(name, str(value))]


def operation(  # noqa: PLR0913 - everything that a declaration says
    method: Method,
    path: str,
    *,
    scope: str,
    status: int = 200,
    errors: tuple[PossibleError, ...] = (),
    headers: tuple[RequestHeader, ...] = (),
    example: Example = Example(),
    media: tuple[str, ...] = (JSON,),
    takes_key_alone: bool = False,
    most_values: int = MAXIMUM_VALUES,
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare the decorated signature as an API operation (see the module's docstring).

    `errors` names those that its own rules raise, e.g. `(ModelNotFound, QuotaExceeded, (DatasetError, 409))`.
    """

    def declare(declaration: Callable[P, R]) -> Operation[P, R]:
        declared = Operation(
            method=method,
            path=path,
            scope=scope,
            status=status,
            errors=errors,
            headers=headers,
            example=example,
            declaration=declaration,
            media=media,
            takes_key_alone=takes_key_alone,
            most_values=most_values,
        )
        DECLARED.append(declared)
        return declared

    return declare
