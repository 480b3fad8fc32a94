"""Puts the frames of a `Stream` on the wire: server-sent events, or one JSON object a line.

A stream ends when its frames do, when the service drains, or when the reader is gone; in each case its generator is
closed and its place in the count is given back. While nothing comes it is one waiting task: no thread, no connection
to the database. A slow reader slows the generator down, not the memory up.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, suppress

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tuneship.contract.errors import ApiError
from tuneship.service.common.drain import Drain
from tuneship.service.common.streaming import Frame, Stream
from tuneship.service.context.context import Context
from tuneship.service.http.answers import error_response

KEEP_ALIVE_S = 15.0
# For the end of the message, when the reader may have stopped reading.
LAST_WORDS_S = 1.0
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def wanted_media(accept: Sequence[str]) -> str:
    """Lines where the caller asks for them before it asks for events; else events."""
    asked = [one.partition(";")[0].strip().lower() for one in ",".join(accept).split(",")]
    return next((one for one in asked if one in (EVENTS, LINES)), EVENTS)


class StreamResponse(Response):
    """The answer to one request that asked for a stream."""

    def __init__(
        self, context: Context, stream: Stream, slot: AbstractContextManager[object]
    ) -> None:
        """`slot` is entered before the first byte and left behind the last; what it raises is the answer instead."""
        self._drain = context.parts.drain
        self._stream = stream
        self.slot: AbstractContextManager[object] = slot
        own = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers={**context.headers, **own})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one of the three ends."""
        request = Request(scope)
        async with aclosing(self._stream.frames):
            with ExitStack() as held:
                try:
                    held.enter_context(self.slot)
                except ApiError as refusal:
                    await error_response(request, refusal)(scope, receive, send)
                    return
                self.headers["content-type"] = wanted_media(request.headers.getlist("accept"))
                await self._send_until_an_end(receive, send)

    async def _send_until_an_end(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send_frames(send))
        gone = asyncio.create_task(_disconnected(receive))
        tasks = [sending, gone]
        if not self._stream.outlasts_drain:
            tasks.append(asyncio.create_task(_begun(self._drain)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_read = not gone.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not sending.cancelled() and (failure := sending.exception()) is not None:
            raise failure
        if is_read:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await send({"type": "http.response.body", "body": b""})

    async def _send_frames(self, send: Send) -> None:
        render = as_line if self.headers["content-type"] == LINES else as_event
        async with aclosing(_with_pauses(self._stream.frames)) as frames:
            async for together in frames:
                if body := b"".join(map(render, together)):
                    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _with_pauses(
    frames: AsyncGenerator[Sequence[Frame]],
) -> AsyncGenerator[Sequence[Frame | None]]:
    """The frames, and a None for every `KEEP_ALIVE_S` in which none came."""
    upcoming: asyncio.Future[Sequence[Frame] | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(frames, None))
            done, _ = await asyncio.wait((upcoming,), timeout=KEEP_ALIVE_S)
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


async def _begun(drain: Drain) -> None:
    await drain.wait()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def as_event(frame: Frame | None) -> bytes:
    """One event of the WHATWG's format; a comment keeps an idle connection from being cut."""
    if frame is None:
        return b": keep-alive\n\n"
    text = frame.data.model_dump_json() if isinstance(frame.data, BaseModel) else frame.data
    head = f"id: {frame.id}\n" if frame.id else ""
    data = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"{head}event: {frame.event}\n{data}\n".encode()


def as_line(frame: Frame | None) -> bytes:
    """One JSON object; what is no object is a mark that readers of lines do not need: their end is the end."""
    if frame is None or not isinstance(frame.data, BaseModel):
        return b""
    return frame.data.model_dump_json().encode() + b"\n"
