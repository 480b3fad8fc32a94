"""A generation as a stream: pieces of text as they are written, at the end the whole reply or what went wrong.

The generation runs in a task of its own, from its first moment to its record in the metrics: it does not wait for a
slow reader, and its time limit is one task's. Knows no replica; `handlers.py` says what runs.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from tuneship.contract.errors import ApiError, InternalError
from tuneship.contract.generation import BrokenOff, GeneratedText, Generation
from tuneship.service.common.streaming import Frame, Stream

logger = logging.getLogger(__name__)

# Takes the next piece of a completion.
Tell = Callable[[str], None]


async def streamed(whole: Callable[[Tell], Coroutine[Any, Any, Generation]], name: str) -> Stream:
    """Returns when the first text is there; what is refused or fails before is raised. `name` is for the log."""
    frames = _frames(whole, name)
    await anext(frames)
    return Stream(frames, outlasts_drain=True)


async def _frames(
    whole: Callable[[Tell], Coroutine[Any, Any, Generation]], name: str
) -> AsyncGenerator[Sequence[Frame]]:
    """First nothing, as a sign that the stream can begin: from there on, closing it ends the generation."""
    pieces: list[Frame] = []
    news = asyncio.Event()

    def tell(text: str) -> None:
        pieces.append(Frame("token", GeneratedText(text=text)))
        news.set()

    working = asyncio.create_task(whole(tell))
    working.add_done_callback(lambda _: news.set())
    try:
        await news.wait()
        if not pieces:
            await working  # over without a text: raises what went wrong
        yield ()
        while True:
            news.clear()
            is_over = working.done()
            if pieces:
                told, pieces[:] = tuple(pieces), ()
                yield told
            if is_over:
                break
            await news.wait()
        yield (_end(working, name),)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _end(working: "asyncio.Task[Generation]", name: str) -> Frame:
    error = working.exception()
    if error is None:
        return Frame("done", working.result())
    if not isinstance(error, ApiError):
        logger.error("%s failed", name, exc_info=error)
        error = InternalError("the service failed unexpectedly")
    return Frame("error", BrokenOff.model_validate(error.as_json(name)))
