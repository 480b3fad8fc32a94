"""The gateway's end of a replica: loads adapters and streams generations over one socket. Never loads torch.

ServingError
├── ReplicaRefused   the replica lives and said no (unknown adapter, prompt too long, bad files, output not finite)
│   └── RequestTooLarge   the request alone needs more memory than all requests may use
└── ReplicaLost      the process is gone: whatever was under way has to be done again elsewhere
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tuneship.serving.sequence import FinishReason, GenerateRequest

__all__ = [
    "ANSWER_TIMEOUT_S",
    "FinishReason",
    "GenerateRequest",
    "ReplicaFacts",
    "ReplicaLine",
    "ReplicaLost",
    "ReplicaRefused",
    "RequestTooLarge",
    "ServingError",
    "TokenStream",
]

FIELDS = tuple(one.name for one in fields(GenerateRequest))
# For anything but a generation: reading a big adapter from a slow disk takes longest.
ANSWER_TIMEOUT_S = 120.0
# A frame holds one token per running request: far below this.
_FRAME_BYTES = 1 << 20


class ServingError(Exception):
    """No answer from a replica."""


class ReplicaRefused(ServingError):
    """The replica lives and refused; the message never holds prompt text."""


class RequestTooLarge(ReplicaRefused):
    """It never fits; the message holds the two counts of tokens and may be shown to the caller."""


class ReplicaLost(ServingError):
    """The replica's process ended, or it broke the protocol."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself when it is ready."""

    pid: int
    parameters: int
    context_length: int
    vocabulary: int
    dtype: str


class TokenStream(AsyncIterator[list[int]]):
    """Chunks of token ids. Closing it early (`aclose`, or leaving `async with`) cancels the request."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        """Made by a link's `generate`, which also tells it what arrives; `cancel` frees what works on it."""
        self._cancel = cancel
        self._tokens: list[int] = []
        self._changed = asyncio.Event()
        self._is_awaited_whole = False
        self._error: ServingError | None = None
        self._over = False
        self.finish_reason: FinishReason | None = None
        """Set when the iteration has ended by itself."""

    async def __anext__(self) -> list[int]:
        """All tokens that arrived since the last call; raises `ServingError`."""
        while not (self._tokens or self._over):
            self._changed.clear()
            await self._changed.wait()
        if self._tokens:
            chunk, self._tokens = self._tokens, []
            return chunk
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def read_all(self) -> list[int]:
        """All tokens that are still to come: who waits for the whole is woken once, not for each of them."""
        self._is_awaited_whole = True
        return [token async for chunk in self for token in chunk]

    async def __aenter__(self) -> Self:
        """Nothing to prepare: the request is on its way already."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Whatever way it is left, the replica's row is freed."""
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel unless it has ended."""
        if not self._over:
            self._over = True
            self._cancel()

    def add(self, token: int) -> None:
        """A token has arrived."""
        self._tokens.append(token)
        if not self._is_awaited_whole:
            self._changed.set()

    def finish(self, reason: FinishReason) -> None:
        """It has ended by itself."""
        self.finish_reason = reason
        self._over = True
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """It cannot go on; the iteration raises the error after the tokens that came before it."""
        self._error = error
        self._over = True
        self._changed.set()


class ReplicaLine:
    """Many concurrent conversations with one replica over one socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, facts: ReplicaFacts
    ) -> None:
        """Use `open`."""
        self.facts = facts
        self._writer = writer
        self._ids = count()
        self._generations: dict[str, TokenStream] = {}
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._lost: ReplicaLost | None = None
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def open(cls, stream: socket.socket) -> Self:
        """Waits until the replica has loaded its base model. Raises `ReplicaRefused` (it cannot) or `ReplicaLost`."""
        reader, writer = await asyncio.open_connection(sock=stream, limit=_FRAME_BYTES)
        try:
            frame = await _read_frame(reader)
            return cls(reader, writer, _introduced(frame))
        except BaseException:
            writer.close()
            raise

    @property
    def in_flight(self) -> int:
        """Generations that have not ended."""
        return len(self._generations)

    @property
    def is_lost(self) -> bool:
        """Whether the replica is gone."""
        return self._lost is not None

    async def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Make the adapter directory, whose files `key` opens, available under a name."""
        await self._ask("load", adapter=adapter, path=str(path), key=key)

    async def unload(self, adapter: str) -> None:
        """Raises `ReplicaRefused` while requests use it."""
        await self._ask("unload", adapter=adapter)

    async def stats(self) -> dict[str, int]:
        """Counts: running, waiting, rows, adapters, steps, generated_tokens, reused_tokens, cache_bytes, pid."""
        return await self._ask("stats")

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Start at once; iterate over the result. A refusal is raised by the iteration."""
        identifier = str(next(self._ids))
        generation = TokenStream(partial(self._cancel, identifier))
        if self._lost is not None:
            generation.fail(ReplicaLost(str(self._lost)))
            return generation
        self._generations[identifier] = generation
        asked = {name: getattr(request, name) for name in FIELDS}  # `asdict` copies every token
        self._send({"op": "generate", "id": identifier, **asked})
        return generation

    async def aclose(self) -> None:
        """Hang up: the replica ends."""
        self._listening.cancel()
        self._lose(ReplicaLost("the line was closed"))
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def wait_lost(self) -> ReplicaLost:
        """Returns when the replica is gone: for the one who restarts it."""
        await asyncio.wait([self._listening])
        return self._lost or ReplicaLost("the line was closed")

    async def _ask(self, operation: str, **arguments: str | None) -> dict[str, Any]:
        if self._lost is not None:
            raise ReplicaLost(str(self._lost))
        identifier = str(next(self._ids))
        answer = asyncio.get_running_loop().create_future()
        self._answers[identifier] = answer
        self._send({"op": operation, "id": identifier, **arguments})
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise ReplicaLost("the replica did not answer in time") from None
        finally:
            self._answers.pop(identifier, None)

    def _cancel(self, identifier: str) -> None:
        if self._generations.pop(identifier, None) and self._lost is None:
            self._send({"op": "cancel", "id": identifier})

    def _send(self, frame: dict[str, Any]) -> None:
        self._writer.write(json.dumps(frame, separators=(",", ":")).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._hear(await _read_frame(reader))
        except ReplicaLost as lost:
            self._lose(lost)
        except (KeyError, TypeError, ValueError) as error:
            self._lose(ReplicaLost(f"the replica broke the protocol: {type(error).__name__}"))
        finally:
            if self._lost is None:  # cancelled: an answer that nobody reads is not to be waited for
                self._lose(ReplicaLost("the line was closed"))

    def _hear(self, frame: dict[str, Any]) -> None:
        if "tokens" in frame:
            self._hear_step(frame)
        else:
            self._hear_answer(frame)

    def _hear_step(self, frame: dict[str, Any]) -> None:
        """Ids that are no longer known were cancelled meanwhile."""
        for identifier, token in frame["tokens"]:
            if (generation := self._generations.get(identifier)) is not None:
                generation.add(token)
        for identifier, reason in frame["finished"]:
            if (generation := self._generations.pop(identifier, None)) is not None:
                generation.finish(FinishReason(reason))

    def _hear_answer(self, frame: dict[str, Any]) -> None:
        identifier, refusal = frame["id"], frame.get("error")
        if (generation := self._generations.pop(identifier, None)) is not None:
            refused = RequestTooLarge if frame.get("too_large") else ReplicaRefused
            kind = ReplicaLost if frame.get("lost") else refused
            generation.fail(kind(refusal))
        elif (answer := self._answers.get(identifier)) is not None and not answer.done():
            if refusal is None:
                answer.set_result({key: frame[key] for key in frame.keys() - {"id", "ok"}})
            else:
                answer.set_exception(ReplicaRefused(refusal))

    def _lose(self, lost: ReplicaLost) -> None:
        self._lost = lost
        for generation in self._generations.values():
            generation.fail(ReplicaLost(str(lost)))  # each raises its own
        self._generations.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ReplicaLost(str(lost)))
        self._writer.transport.abort()  # a replica that hangs reads nothing: a close would wait for it


def _introduced(frame: dict[str, Any]) -> ReplicaFacts:
    if "refused" in frame:
        raise ReplicaRefused(frame["refused"])
    return ReplicaFacts(**frame["ready"])


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        line = await reader.readline()
    except ConnectionError as error:
        raise ReplicaLost("the connection to the replica broke") from error
    if not line.endswith(b"\n"):
        raise ReplicaLost("the replica's process ended")
    return json.loads(line)
