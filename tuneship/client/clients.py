"""`Client` and `AsyncClient`: they do the I/O of a call; generators without I/O make all its decisions.

A generator yields what to do next (send, read, pause) and receives what came of it: `core.py` for a call,
`following.py` and `generation_stream.py` for streams. Each client carries out these steps in its own way of I/O.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import httpx
from pydantic import BaseModel

from tuneship.client.archives import archive_of, downloaded
from tuneship.client.base import ENCODING_HEADERS, BaseClient, Options
from tuneship.client.core import Conversation, HttpAnswer, Pause
from tuneship.client.following import Block, Followed, Following, Read
from tuneship.client.uploads import upload_file
from tuneship.contract.declaring.operation import Call, Operation
from tuneship.contract.declaring.pages import Arguments, Paged, Walk
from tuneship.contract.declaring.verbs import AnyPath, Asynchronous, Blocking, Columns, Source
from tuneship.contract.generation import GeneratedText, Generation
from tuneship.contract.reports.job_reports import JobLogEntry, JobStep
from tuneship.contract.resources import Api
from tuneship.settings import ClientSettings

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
HTTP_FAILURES = (httpx.HTTPError, httpx.InvalidURL)


class Client(BaseClient, Blocking, Api[Blocking]):
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
        self._bind_resources(self)
        # Variables of the environment must not lead the API key through a proxy.
        self._http = http or httpx.Client(
            transport=transport, timeout=self._timeout(), trust_env=False, verify=self._tls()
        )

    def with_options(self, **changes: Any) -> Self:
        """The same connection with other `Options`, e.g. `client.with_options(idempotency_key=key)`."""
        return type(self)(self.settings, options=replace(self.options, **changes), http=self._http)

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `TuneshipError`."""
        return self._carried_out(self._conversation(operation, *args, **kwargs))

    def until(
        self,
        operation: Operation[P, R],
        is_over: Callable[[R], bool],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call an operation until its reply says that all is over; `client.evaluations.wait(...)` does it."""
        return self._carried_out(self._polling(operation, is_over, *args, **kwargs))

    def _carried_out(self, talk: Conversation[R]) -> R:
        answer: HttpAnswer | None = None
        try:
            while True:
                step = talk.send(answer)
                if isinstance(step, Pause):
                    self._wait(step)
                    answer = None
                else:
                    answer = self._send(step)
        except StopIteration as end:
            return end.value

    def _send(self, call: Call) -> HttpAnswer:
        try:
            with self._http.stream(**self._request(call)) as response:
                # Read block by block: httpx's timeout holds for each of them, the deadline for all together.
                blocks: list[bytes] = []
                sink = call.sink if response.is_success else None
                for block in response.iter_bytes():
                    if sink is None:
                        blocks.append(block)
                    else:
                        sink.write(block)
                        self._report_received(response)
                    if self._seconds_left() <= 0:
                        raise httpx.ReadTimeout("the answer did not end before the deadline")
        except HTTP_FAILURES as failure:
            return HttpAnswer(failure=failure)
        # The body is decoded by now: httpx would decode it again by these headers.
        headers = [
            (name, value)
            for name, value in response.headers.multi_items()
            if name not in ENCODING_HEADERS
        ]
        return HttpAnswer(
            httpx.Response(
                response.status_code,
                headers=headers,
                content=b"".join(blocks),
                request=response.request,
            )
        )

    def send_folder(self, operation: Operation[..., R], form: BaseModel, folder: AnyPath) -> R:
        """Do what `client.models.import_(form, folder)` does. Raises `SourceError` before anything is sent."""
        with archive_of(folder) as file:
            return self.call(operation, form, file)

    def download(
        self, folder: AnyPath, operation: Operation[P, bytes], *args: P.args, **kwargs: P.kwargs
    ) -> Path:
        """Do what `client.models.download(folder, ...)` does. Raises `SourceError` for a folder that cannot be made."""
        target = Path(folder)
        with downloaded(target) as (sink, unpack):
            call = replace(operation.bind(*args, **kwargs), sink=sink)
            self._carried_out(self._conversation_of(operation, call))
            unpack()
        return target

    def upload(
        self,
        operation: Operation[..., R],
        form: BaseModel,
        source: Source,
        columns: Columns | None = None,
    ) -> R:
        """Do what `client.datasets.upload(form, source)` does. Raises `SourceError` before anything is sent."""
        with upload_file(source, columns) as (file, fill):
            fill()
            return self.call(operation, form, file)

    def walk(self, paged: Paged[R, T], given: Arguments) -> Iterator[T]:
        """Yield every entry of a list operation; usually called as `client.jobs.iterate(...)`."""
        walk = Walk(paged, given)
        while not walk.ended:
            yield from walk.take(self.call(paged.operation, **walk.arguments))

    def follow_job(self, job_id: str, after: str | None = None) -> Generator[JobLogEntry | JobStep]:
        """Do what `client.jobs.follow_logs(job_id)` does; leaving the loop early closes the connection."""
        return self._entries(*self._job_stream(job_id, after))

    def stream(
        self, operation: Operation[P, Generation], *args: P.args, **kwargs: P.kwargs
    ) -> Generator[GeneratedText | Generation]:
        """Do what `client.deployments.stream(...)` does; leaving the loop early ends the generation."""
        return self._entries(*self._generation_stream(operation, *args, **kwargs))

    def _entries(self, talk: Following, read_timeout_s: float) -> Generator[Any]:
        """Carry out the steps of a stream and yield its entries."""
        answer: HttpAnswer | Block | None = None
        with closing(_OpenAnswer(self._http)) as opened:
            while True:
                try:
                    step, answer = talk.send(answer), None
                except StopIteration:
                    return
                if isinstance(step, Followed):
                    yield step.entry
                elif isinstance(step, Pause):
                    self._wait(step)
                elif isinstance(step, Read):
                    answer = opened.read()
                else:
                    request = self._stream_request(step.call, read_timeout_s)
                    answer = self._report_headers(opened.open(request))

    @staticmethod
    def _wait(pause: Pause) -> None:
        # A method, because tests note the pauses instead of waiting.
        time.sleep(pause.seconds)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Enter a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()


class AsyncClient(BaseClient, Asynchronous, Api[Asynchronous]):
    """The client for asyncio. Close it, or use it in an `async with` block."""

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx.AsyncBaseTransport | None = None,
        options: Options | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Connect lazily; `transport` is the seam for tests."""
        super().__init__(settings, options or Options())
        self._bind_resources(self)
        self._http = http or httpx.AsyncClient(
            transport=transport,
            timeout=self._timeout(),
            trust_env=False,
            verify=self._tls(),
            # As many as the traffic driver may have in flight; httpx's own limit of 100 would queue them.
            limits=httpx.Limits(max_connections=1024, max_keepalive_connections=64),
        )

    def with_options(self, **changes: Any) -> Self:
        """The same connection with other `Options`."""
        return type(self)(self.settings, options=replace(self.options, **changes), http=self._http)

    async def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `TuneshipError`."""
        return await self._carried_out(self._conversation(operation, *args, **kwargs))

    async def until(
        self,
        operation: Operation[P, R],
        is_over: Callable[[R], bool],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call an operation until its reply says that all is over; `client.evaluations.wait(...)` does it."""
        return await self._carried_out(self._polling(operation, is_over, *args, **kwargs))

    async def _carried_out(self, talk: Conversation[R]) -> R:
        answer: HttpAnswer | None = None
        try:
            while True:
                step = talk.send(answer)
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    answer = None
                else:
                    answer = await self._send(step)
        except StopIteration as end:
            return end.value

    async def _send(self, call: Call) -> HttpAnswer:
        try:
            async with asyncio.timeout(None if math.isinf(left := self._seconds_left()) else left):
                if call.sink is None:
                    return HttpAnswer(await self._http.request(**self._request(call)))
                async with self._http.stream(**self._request(call)) as response:
                    # An error is read as usual, and only the body of a good answer goes into the file.
                    if not response.is_success:
                        await response.aread()
                        return HttpAnswer(response)
                    async for block in response.aiter_bytes():
                        await asyncio.to_thread(call.sink.write, block)
                        self._report_received(response)
                return HttpAnswer(httpx.Response(response.status_code, content=b""))
        except HTTP_FAILURES as failure:
            return HttpAnswer(failure=failure)
        except TimeoutError:
            return HttpAnswer(failure=httpx.ReadTimeout("no answer before the deadline"))

    async def send_folder(
        self, operation: Operation[..., R], form: BaseModel, folder: AnyPath
    ) -> R:
        """Do what `client.models.import_(form, folder)` does. Raises `SourceError` before anything is sent."""
        with archive_of(folder) as file:
            return await self.call(operation, form, file)

    async def download(
        self, folder: AnyPath, operation: Operation[P, bytes], *args: P.args, **kwargs: P.kwargs
    ) -> Path:
        """Do what `client.models.download(folder, ...)` does. Raises `SourceError` for a folder that cannot be made."""
        target = Path(folder)
        with downloaded(target) as (sink, unpack):
            call = replace(operation.bind(*args, **kwargs), sink=sink)
            await self._carried_out(self._conversation_of(operation, call))
            await asyncio.to_thread(unpack)
        return target

    async def upload(
        self,
        operation: Operation[..., R],
        form: BaseModel,
        source: Source,
        columns: Columns | None = None,
    ) -> R:
        """Do what `client.datasets.upload(form, source)` does. Raises `SourceError` before anything is sent."""
        with upload_file(source, columns) as (file, fill):
            # If this is cancelled, the file closes, and the thread ends at its next row.
            await asyncio.to_thread(fill)
            return await self.call(operation, form, file)

    async def walk(self, paged: Paged[R, T], given: Arguments) -> AsyncIterator[T]:
        """Yield every entry of a list operation; usually called as `client.jobs.iterate(...)`."""
        walk = Walk(paged, given)
        while not walk.ended:
            for entry in walk.take(await self.call(paged.operation, **walk.arguments)):
                yield entry

    def follow_job(
        self, job_id: str, after: str | None = None
    ) -> AsyncGenerator[JobLogEntry | JobStep]:
        """Do what `client.jobs.follow_logs(job_id)` does; `aclosing` it closes the connection early."""
        return self._entries(*self._job_stream(job_id, after))

    def stream(
        self, operation: Operation[P, Generation], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[GeneratedText | Generation]:
        """Do what `client.deployments.stream(...)` does; `aclosing` it ends the generation early."""
        return self._entries(*self._generation_stream(operation, *args, **kwargs))

    async def _entries(self, talk: Following, read_timeout_s: float) -> AsyncGenerator[Any]:
        """Carry out the steps of a stream and yield its entries."""
        answer: HttpAnswer | Block | None = None
        async with aclosing(_AsyncOpenAnswer(self._http)) as opened:
            while True:
                try:
                    step, answer = talk.send(answer), None
                except StopIteration:
                    return
                if isinstance(step, Followed):
                    yield step.entry
                elif isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Read):
                    answer = await opened.read()
                else:
                    request = self._stream_request(step.call, read_timeout_s)
                    answer = self._report_headers(await opened.open(request))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Enter an `async with` block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()


class _OpenAnswer:
    """The answer that is being streamed; a new one closes the one before."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._blocks: Iterator[bytes] = iter(())

    def open(self, request: dict[str, Any]) -> HttpAnswer:
        self.close()
        try:
            self._response = self._http.send(self._http.build_request(**request), stream=True)
            if not self._response.is_success:
                self._response.read()
        except HTTP_FAILURES as failure:
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


class _AsyncOpenAnswer:
    """The answer that is being streamed on asyncio; a new one closes the one before."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._blocks: AsyncIterator[bytes] | None = None

    async def open(self, request: dict[str, Any]) -> HttpAnswer:
        await self.aclose()
        try:
            built = self._http.build_request(**request)
            self._response = await self._http.send(built, stream=True)
            if not self._response.is_success:
                await self._response.aread()
        except HTTP_FAILURES as failure:
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
