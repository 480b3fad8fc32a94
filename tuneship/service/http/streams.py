"""Puts the frames of a `Stream` on the wire: server-sent events, or one JSON object a line.

A stream ends with its frames, when the service drains, when the reader disconnects, or with an error when the reader's
key ends; in each case its generator is closed and its slot released. Between frames it is one waiting task, without a
thread or a database connection. A slow reader slows the generator down instead of filling the memory.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, suppress

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tuneship.contract.errors import ApiError
from tuneship.service.answers.long_answers import dumped_frame, is_long
from tuneship.service.answers.streaming import Frame, Stream
from tuneship.service.context.context import Context
from tuneship.service.context.operation_calls import KeyEnd
from tuneship.service.http.disconnect import send_while_connected
from tuneship.service.http.responses import error_response

# The timeout for sending the end of the message: the reader may have stopped reading.
END_TIMEOUT_S = 1.0
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def wanted_media(accept: Sequence[str]) -> str:
    """The media type of a stream: JSON lines where `Accept` names them before events, else events."""
    named = [media.partition(";")[0].strip().lower() for media in ",".join(accept).split(",")]
    return next((media for media in named if media in (EVENTS, LINES)), EVENTS)


class StreamResponse(Response):
    """The answer to one request for a stream."""

    def __init__(
        self,
        context: Context,
        stream: Stream,
        slot: AbstractContextManager[object],
        key_end: KeyEnd,
    ) -> None:
        """`slot`: held while the stream is sent; an error that it raises is sent as the answer instead.

        `key_end` returns, when the reader's key ends, the error that the stream ends with.
        """
        self._context = context
        self._key_end = key_end
        self._drain = context.parts.drain
        self._keep_alive_s = context.parts.timing.keep_alive_s
        self._stream = stream
        self._slot = slot
        own = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers={**context.headers, **own})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends, the service drains, the reader disconnects or its key ends."""
        request = Request(scope)
        async with aclosing(self._stream.frames):
            with ExitStack() as held:
                try:
                    held.enter_context(self._slot)
                except ApiError as error:
                    await error_response(request, error)(scope, receive, send)
                    return
                accept = [] if self._stream.is_events_only else request.headers.getlist("accept")
                self.headers["content-type"] = wanted_media(accept)
                await self._send(receive, send)

    async def _send(self, receive: Receive, send: Send) -> None:
        render = as_line if self.headers["content-type"] == LINES else as_event
        error: ApiError | None = None
        is_whole = False

        async def note_key_end() -> None:
            nonlocal error
            error = await self._key_end()

        texts, client_id = self._context.parts.threads.texts, self._context.client_id

        async def send_frames() -> None:
            nonlocal is_whole
            async with aclosing(
                with_keep_alives(self._stream.frames, self._keep_alive_s)
            ) as frames:
                async for together in frames:
                    if is_long([frame and frame.data for frame in together]):
                        body = await texts.run(client_id, _rendered, render, together)
                    else:
                        body = _rendered(render, together)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            is_whole = True

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        ends = () if self._stream.outlasts_drain else (self._drain.wait(),)
        if await send_while_connected(send_frames(), receive, note_key_end(), *ends):
            last = b""
            # A key may end in the moment in which the last frame was sent.
            if error is not None and not is_whole:
                last = _rendered(render, await self._broken_off(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": last})

    async def _broken_off(self, error: ApiError) -> Sequence[Frame]:
        """End the work, record its end like that of a refused request, and return the last frames."""
        await self._stream.frames.aclose()
        context = self._context
        if context.audit_facts.requires_entry(error.status):
            await asyncio.to_thread(context.commit_audit_entry, error.status)
        return self._stream.broken_off(error, context.request_id)


async def with_keep_alives(
    frames: AsyncGenerator[Sequence[Frame]], silence_s: float
) -> AsyncGenerator[Sequence[Frame | None]]:
    """The frames, with a None after every `silence_s` seconds without one."""
    upcoming: asyncio.Future[Sequence[Frame] | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(frames, None))
            done, _ = await asyncio.wait((upcoming,), timeout=silence_s)
            if not done:
                yield [None]
                continue
            together, upcoming = upcoming.result(), None
            if together is None:
                return
            yield together
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait((upcoming,))


def _rendered(render: Callable[[Frame | None], bytes], together: Sequence[Frame | None]) -> bytes:
    return b"".join(map(render, together))


def as_event(frame: Frame | None) -> bytes:
    """A frame as a server-sent event; None as a comment, which keeps an idle connection from being cut."""
    if frame is None:
        return b": keep-alive\n\n"
    text = dumped_frame(frame.data) if isinstance(frame.data, BaseModel) else frame.data
    head = f"id: {frame.id}\n" if frame.id else ""
    head += f"event: {frame.event}\n" if frame.event else ""
    data = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"{head}{data}\n".encode()


def as_line(frame: Frame | None) -> bytes:
    """A frame as a line of JSON; empty for marks such as `[DONE]`, which readers of lines do not need."""
    if frame is None or not isinstance(frame.data, BaseModel):
        return b""
    return dumped_frame(frame.data).encode() + b"\n"
