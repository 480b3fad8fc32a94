"""`Client` and `AsyncClient`: connections, headers, and the few lines that obey the core in `core.py`."""

import asyncio
import json
import math
import random
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Self, TypeVar

import httpx

from tuneship.client import resources
from tuneship.client.core import HttpAnswer, Pause, converse
from tuneship.client.following import MEDIA, SILENCE_S, Block, Followed, Following, Read, follow_job
from tuneship.client.generation_stream import stream_generation, streaming
from tuneship.client.pages import Arguments, Paged, Walk
from tuneship.client.uploads import Progress, Readable, WatchedFile
from tuneship.contract.errors import DeadlineExceeded
from tuneship.contract.generation import GeneratedText, Generation
from tuneship.contract.jobs import JobLogEntry, JobStep
from tuneship.contract.operation import Call, Operation
from tuneship.settings import ClientSettings

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# Headers that describe the bytes on the wire, not those that were decoded.
_CODED = frozenset({"content-encoding", "content-length", "transfer-encoding"})


@dataclass(frozen=True)
class Options:
    """What a caller may set for a call beside its arguments."""

    idempotency_key: str | None = None
    """None: creates, and changes that may be tried again, get a key of their own for each call."""
    if_match: str | None = None
    routing_key: str | None = None
    tries: int | None = None
    timeout_s: float | None = None
    progress: Progress | None = None
    """Told how far an upload is."""
    heard: Callable[[Mapping[str, str]], None] | None = None
    """Told the headers of a streamed answer when they come, before its first piece."""
    ends_at: float | None = None
    """Moment of `time.monotonic()` at which a call has an answer or raises `DeadlineExceeded`, pauses included.

    A stream must have ended by then, too.
    """


class _Core:
    """What both clients share: settings, options, and how a call becomes an httpx request."""

    def __init__(self, settings: ClientSettings, options: Options) -> None:
        self.settings = settings
        self.options = options

    @property
    def _tries(self) -> int:
        return self.options.tries or self.settings.tries

    def _left_s(self) -> float:
        """Seconds that the caller still gives."""
        ends_at = self.options.ends_at
        return math.inf if ends_at is None else ends_at - time.monotonic()

    def _check_deadline(self, name: str, needed_s: float) -> None:
        if self._left_s() <= needed_s:
            raise DeadlineExceeded(f"{name}: no answer before the deadline")

    def _bound(self, operation: Operation[P, Any], *args: P.args, **kwargs: P.kwargs) -> Call:
        """The request of one call, with the one key that all of its tries carry.

        A create gets a key even for a single try: something between client and service may repeat it. Any other
        change gets one only where this client may repeat it: who sends a change once reads back what became of it.
        """
        call, key = operation.bind(*args, **kwargs), self.options.idempotency_key
        may_repeat = operation.is_creating or self._tries > 1
        if key is None and operation.takes_idempotency_key and may_repeat:
            key = secrets.token_hex(16)
        return replace(call, idempotency_key=key)

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self.settings.api_key.get_secret_value()}",
            "X-Client-ID": self.settings.client_id,
            "Accept": "application/json",
            "X-API-Profile": "auto",  # the models hold the names of both references, whatever the service's default
        }
        extra = {
            "Idempotency-Key": call.idempotency_key,
            "If-Match": self.options.if_match,
            "X-Routing-Key": self.options.routing_key,
        }
        return headers | {name: value for name, value in extra.items() if value is not None}

    def _arguments(self, call: Call) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "method": call.method,
            "url": base_url(self.settings.url) + call.path,
            "params": list(call.query),
            "headers": self._headers(call),
        }
        left_s = self._left_s()
        if self.options.timeout_s is not None:
            arguments["timeout"] = min(self.options.timeout_s, left_s)
        elif left_s < self.settings.read_timeout_s:
            connect_s = min(self.settings.connect_timeout_s, left_s)
            arguments["timeout"] = httpx.Timeout(left_s, connect=connect_s)
        if call.body is not None:
            arguments["json"] = call.body
        if call.form is not None and call.file is not None:
            arguments["data"] = {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in call.form.items()
            }
            told = self.options.progress
            file: Readable = call.file if told is None else WatchedFile(call.file, told)
            arguments["files"] = {"file": ("data.jsonl", file, "application/jsonl")}
        return arguments

    def _stream_arguments(self, call: Call, patience_s: float) -> dict[str, Any]:
        patience = httpx.Timeout(patience_s, connect=self.settings.connect_timeout_s)
        arguments = {"timeout": patience} | self._arguments(call)
        return arguments | {"headers": self._headers(call) | {"Accept": MEDIA}}

    def _heard(self, answer: HttpAnswer) -> HttpAnswer:
        if self.options.heard is not None and answer.response is not None:
            self.options.heard(answer.response.headers)
        return answer

    def _trust(self) -> ssl.SSLContext | bool:
        file = self.settings.ca_file
        return True if file is None else ssl.create_default_context(cafile=str(file))

    def _timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.settings.read_timeout_s, connect=self.settings.connect_timeout_s)


def base_url(url: str) -> str:
    """The address without a trailing slash or version: `{base_url}` is accepted in both forms (§1, §4.9)."""
    return url.rstrip("/").removesuffix("/v1")


class _Line:
    """One streamed answer at a time."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._blocks: Iterator[bytes] = iter(())

    def open(self, arguments: dict[str, Any]) -> HttpAnswer:
        self.close()
        try:
            self._response = self._http.send(self._http.build_request(**arguments), stream=True)
            if not self._response.is_success:
                self._response.read()
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            return HttpAnswer(failure=failure)
        self._blocks = self._response.iter_bytes()
        return HttpAnswer(self._response)

    def read(self) -> Block:
        try:
            return Block(next(self._blocks, None))
        except httpx.HTTPError:
            return Block()

    def close(self) -> None:
        if self._response is not None:
            self._response.close()


class _AsyncLine:
    """The same on asyncio."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._blocks: AsyncIterator[bytes] | None = None

    async def open(self, arguments: dict[str, Any]) -> HttpAnswer:
        await self.aclose()
        try:
            request = self._http.build_request(**arguments)
            self._response = await self._http.send(request, stream=True)
            if not self._response.is_success:
                await self._response.aread()
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            return HttpAnswer(failure=failure)
        self._blocks = self._response.aiter_bytes()
        return HttpAnswer(self._response)

    async def read(self) -> Block:
        try:
            return Block(await anext(self._blocks, None) if self._blocks else None)
        except httpx.HTTPError:
            return Block()

    async def aclose(self) -> None:
        if self._response is not None:
            await self._response.aclose()


class Client(_Core):
    """A blocking client. Close it, or use it in a `with` block."""

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx.BaseTransport | None = None,
        options: Options | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        """Connect lazily; `transport` is the seam for tests."""
        super().__init__(settings, options or Options())
        self._http = http or httpx.Client(
            transport=transport, timeout=self._timeout(), trust_env=False, verify=self._trust()
        )
        self.datasets = resources.Datasets(self)
        self.jobs = resources.Jobs(self)
        self.instance_types = resources.InstanceTypeResource(self)
        self.models = resources.Models(self)
        self.deployments = resources.Deployments(self)
        self.endpoints = resources.Endpoints(self)
        self.canary_endpoints = resources.CanaryEndpoints(self)
        self.webhooks = resources.Webhooks(self)
        self.events = resources.Events(self)
        self.audit = resources.Audit(self)

    def with_options(self, **changes: Any) -> Self:
        """The same connection with other `Options`, e.g. `client.with_options(idempotency_key=key)`."""
        return type(self)(self.settings, options=replace(self.options, **changes), http=self._http)

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `ApiError`, `BadResponse` or `ServiceUnreachable`."""
        talk = converse(
            operation, self._bound(operation, *args, **kwargs), self._tries, random.random
        )
        answer: HttpAnswer | None = None
        try:
            while True:
                step = talk.send(answer)
                self._check_deadline(
                    operation.name, step.seconds if isinstance(step, Pause) else 0.0
                )
                answer = self._wait(step) if isinstance(step, Pause) else self._send(step)
                if answer is not None and answer.failure is not None:
                    self._check_deadline(operation.name, 0.0)
        except StopIteration as end:
            return end.value

    def _send(self, call: Call) -> HttpAnswer:
        try:
            with self._http.stream(**self._arguments(call)) as response:
                return HttpAnswer(self._whole(response))
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            return HttpAnswer(failure=failure)

    def _whole(self, response: httpx.Response) -> httpx.Response:
        """The answer read to its end: each block has httpx's time-out, all of them together have the deadline."""
        blocks: list[bytes] = []
        for block in response.iter_bytes():
            blocks.append(block)
            if self._left_s() <= 0:
                raise httpx.ReadTimeout("the answer did not end before the deadline")
        kept = [
            (name, value) for name, value in response.headers.multi_items() if name not in _CODED
        ]
        return httpx.Response(
            response.status_code,
            headers=kept,
            content=b"".join(blocks),
            request=response.request,
        )

    @staticmethod
    def _wait(pause: Pause) -> None:
        time.sleep(pause.seconds)

    def walk(self, paged: Paged[R, T], given: Arguments) -> Iterator[T]:
        """Every entry of a list operation; usually called as `client.jobs.iterate(...)`."""
        walk = Walk(paged, given)
        while not walk.ended:
            yield from walk.take(self.call(paged.operation, **walk.arguments))

    def follow_job(self, job_id: str, after: str | None = None) -> Generator[JobLogEntry | JobStep]:
        """What `client.jobs.follow_logs(job_id)` does; leaving the loop early closes the connection."""
        talk = follow_job(job_id, after, self._tries, random.random)
        return self._followed(talk, SILENCE_S, "get_job_logs")

    def stream(
        self, operation: Operation[P, Generation], *args: P.args, **kwargs: P.kwargs
    ) -> Generator[GeneratedText | Generation]:
        """What `client.deployments.stream(...)` does; leaving the loop early ends the generation."""
        talk = stream_generation(
            operation, streaming(operation.bind(*args, **kwargs)), self._tries, random.random
        )
        return self._followed(talk, self.settings.read_timeout_s, operation.name)

    def _followed(self, talk: Following, patience_s: float, name: str) -> Generator[Any]:
        """What a core finds in streamed answers to the call of this name, until the caller's deadline."""
        told: HttpAnswer | Block | None = None
        with closing(_Line(self._http)) as line:
            while True:
                try:
                    step, told = talk.send(told), None
                except StopIteration:
                    return
                self._check_deadline(name, step.seconds if isinstance(step, Pause) else 0.0)
                if isinstance(step, Followed):
                    yield step.entry
                elif isinstance(step, Pause):
                    self._wait(step)
                elif isinstance(step, Read):
                    told = line.read()
                else:
                    told = self._heard(line.open(self._stream_arguments(step.call, patience_s)))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Enter a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()


class AsyncClient(_Core):
    """The same on asyncio; its block is `async with`."""

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx.AsyncBaseTransport | None = None,
        options: Options | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Connect lazily; `transport` is the seam for tests."""
        super().__init__(settings, options or Options())
        self._http = http or httpx.AsyncClient(
            transport=transport,
            timeout=self._timeout(),
            trust_env=False,
            verify=self._trust(),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )
        self.datasets = resources.AsyncDatasets(self)
        self.jobs = resources.AsyncJobs(self)
        self.instance_types = resources.AsyncInstanceTypes(self)
        self.models = resources.AsyncModels(self)
        self.deployments = resources.AsyncDeployments(self)
        self.endpoints = resources.AsyncEndpoints(self)
        self.canary_endpoints = resources.AsyncCanaryEndpoints(self)
        self.webhooks = resources.AsyncWebhooks(self)
        self.events = resources.AsyncEvents(self)
        self.audit = resources.AsyncAudit(self)

    def with_options(self, **changes: Any) -> Self:
        """The same connection with other `Options`."""
        return type(self)(self.settings, options=replace(self.options, **changes), http=self._http)

    async def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `ApiError`, `BadResponse` or `ServiceUnreachable`."""
        talk = converse(
            operation, self._bound(operation, *args, **kwargs), self._tries, random.random
        )
        answer: HttpAnswer | None = None
        try:
            while True:
                step = talk.send(answer)
                if isinstance(step, Pause):
                    self._check_deadline(operation.name, step.seconds)
                    await asyncio.sleep(step.seconds)
                    answer = None
                else:
                    self._check_deadline(operation.name, 0.0)
                    answer = await self._send(step)
                    if answer.failure is not None:
                        self._check_deadline(operation.name, 0.0)
        except StopIteration as end:
            return end.value

    async def _send(self, call: Call) -> HttpAnswer:
        try:
            async with asyncio.timeout(None if math.isinf(left := self._left_s()) else left):
                return HttpAnswer(await self._http.request(**self._arguments(call)))
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            return HttpAnswer(failure=failure)
        except TimeoutError:
            return HttpAnswer(failure=httpx.ReadTimeout("no answer before the deadline"))

    async def walk(self, paged: Paged[R, T], given: Arguments) -> AsyncIterator[T]:
        """Every entry of a list operation; usually called as `client.jobs.iterate(...)`."""
        walk = Walk(paged, given)
        while not walk.ended:
            for entry in walk.take(await self.call(paged.operation, **walk.arguments)):
                yield entry

    def follow_job(
        self, job_id: str, after: str | None = None
    ) -> AsyncGenerator[JobLogEntry | JobStep]:
        """What `client.jobs.follow_logs(job_id)` does; `aclosing` it closes the connection early."""
        talk = follow_job(job_id, after, self._tries, random.random)
        return self._followed(talk, SILENCE_S, "get_job_logs")

    def stream(
        self, operation: Operation[P, Generation], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[GeneratedText | Generation]:
        """What `client.deployments.stream(...)` does; `aclosing` it ends the generation early."""
        talk = stream_generation(
            operation, streaming(operation.bind(*args, **kwargs)), self._tries, random.random
        )
        return self._followed(talk, self.settings.read_timeout_s, operation.name)

    async def _followed(self, talk: Following, patience_s: float, name: str) -> AsyncGenerator[Any]:
        """What a core finds in streamed answers to the call of this name, until the caller's deadline."""
        told: HttpAnswer | Block | None = None
        line = _AsyncLine(self._http)
        async with aclosing(line):
            while True:
                try:
                    step, told = talk.send(told), None
                except StopIteration:
                    return
                self._check_deadline(name, step.seconds if isinstance(step, Pause) else 0.0)
                if isinstance(step, Followed):
                    yield step.entry
                elif isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Read):
                    told = await line.read()
                else:
                    arguments = self._stream_arguments(step.call, patience_s)
                    told = self._heard(await line.open(arguments))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Enter an `async with` block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()
