"""A generation as a stream: pieces of text as they are generated, at the end the whole reply or the error.

The generation runs in a task of its own until it is recorded in the metrics: it does not wait for a slow reader, and
its time limit belongs to one task. Knows no replica; `generation_run.py` generates.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from tuneship.contract.generation import BrokenOff, GeneratedText, Generation
from tuneship.service.answers.failures import error_from_exception
from tuneship.service.answers.streaming import Frame, Stream

PIECES_TOGETHER = 20


class TextStream:
    """Passes text from the generating task to the reading caller."""

    def __init__(self, request_id: str) -> None:
        """The request's id is for the log and for the error at the end."""
        self._request_id = request_id
        self._pieces: deque[Frame] = deque()
        self._changed = asyncio.Event()

    def emit(self, piece: GeneratedText) -> None:
        """Send the next piece of a completion."""
        self._pieces.append(Frame("token", piece))
        self._changed.set()

    async def open(self, generation: Coroutine[Any, Any, Generation]) -> Stream:
        """Start the generation and return when its first text has arrived.

        Raises the generation's error where it fails, or is refused, before any text.
        """
        frames = self._frames(asyncio.create_task(generation))
        await anext(frames)
        return Stream(frames, outlasts_drain=True)

    async def _frames(
        self, generation: "asyncio.Task[Generation]"
    ) -> AsyncGenerator[Sequence[Frame]]:
        """Yield an empty piece first, as a sign that the stream can begin; closing it ends the generation."""
        generation.add_done_callback(lambda _: self._changed.set())
        try:
            await self._changed.wait()
            if not self._pieces:
                await generation  # it has ended without any text: raises its error
            yield ()

            while True:
                self._changed.clear()
                has_ended = generation.done()
                while self._pieces:
                    # A reader may have been slow: all pieces at once would hold up the event loop.
                    count = min(PIECES_TOGETHER, len(self._pieces))
                    yield [self._pieces.popleft() for _ in range(count)]
                if has_ended:
                    break
                await self._changed.wait()

            error = generation.exception()
            if error is None:
                yield (Frame("done", generation.result()),)
                return
            body = error_from_exception(error, self._request_id).as_json(self._request_id)
            yield (Frame("error", BrokenOff.model_validate(body)),)
        finally:
            generation.cancel()
            await asyncio.gather(generation, return_exceptions=True)
