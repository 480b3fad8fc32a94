"""The service's end of a replica: loads adapters and streams generations over one socket. Never loads torch.

ServingError
├── ReplicaRefused   the replica runs and refused (unknown adapter, prompt too long, bad files, output not finite)
│   ├── RequestTooLarge   the request alone needs more memory than the whole KV cache has
│   └── UnusableGrammar   the grammar of the answer cannot be followed with this model
└── ReplicaLost      the process is gone: requests in flight have to be retried elsewhere
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tuneship.serving.embed_request import ArrivingEmbeddings, EmbedRequest
from tuneship.serving.sequence import FinishReason, GenerateRequest, TokenScore

__all__ = [
    "ANSWER_TIMEOUT_S",
    "MAX_FRAME_BYTES",
    "EmbedRequest",
    "FinishReason",
    "GenerateRequest",
    "ReplicaFacts",
    "ReplicaLost",
    "ReplicaRefused",
    "RequestTooLarge",
    "ServingError",
    "SocketLink",
    "TokenScore",
    "TokenStream",
    "UnusableGrammar",
    "read_frame",
]

FIELDS = tuple(field.name for field in fields(GenerateRequest))
EMBED_FIELDS = tuple(field.name for field in fields(EmbedRequest))
# For every operation but a generation; reading a large adapter from a slow disk takes longest.
ANSWER_TIMEOUT_S = 120.0
# A frame holds one token per running request: far below this.
MAX_FRAME_BYTES = 1 << 20
# Scores of a prompt per frame: with 20 alternatives each, a frame stays far below that.
PROMPT_SCORES_PER_FRAME = 256


class ServingError(Exception):
    """A replica gave no answer."""


class ReplicaRefused(ServingError):
    """The replica runs and refused; the message never holds prompt text."""


class RequestTooLarge(ReplicaRefused):
    """The request can never fit; the message holds the two counts of tokens and may be shown to the caller."""


class UnusableGrammar(ReplicaRefused):
    """The answer cannot be kept to its grammar.

    The message goes on behind the name of the field that asks for it, and may be shown to the caller.
    """


class ReplicaLost(ServingError):
    """The replica's process ended, or it broke the protocol."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts about a replica and its base model, sent when it is ready."""

    pid: int
    # An engine that is not ours says no more than that.
    parameters: int = 0
    context_length: int = 0
    vocabulary: int = 0
    dtype: str = ""


class TokenStream(AsyncIterator[list[int]]):
    """The tokens of one generation, in chunks. Closing it early (`aclose` or leaving `async with`) cancels it."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        """Made by a link's `generate`, which also adds the tokens that arrive; `cancel` ends the request."""
        self._cancel = cancel
        self._tokens: list[int] = []
        self._changed = asyncio.Event()
        self._wakes_at_end = False
        self._error: ServingError | None = None
        self._is_over = False
        # Set when the generation has ended by itself.
        self.finish_reason: FinishReason | None = None
        # Scores of the tokens that arrived, where the request asks for it; a stop token that ended it is one more.
        self.scores: list[TokenScore] = []
        # Scores of the prompt's tokens from the second on, where it asks for them; complete at the first token.
        self.prompt_scores: list[TokenScore] = []

    async def __anext__(self) -> list[int]:
        """Return all tokens that arrived since the last call. Raises `ServingError`."""
        while not (self._tokens or self._is_over):
            self._changed.clear()
            await self._changed.wait()
        if self._tokens:
            chunk, self._tokens = self._tokens, []
            return chunk
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def read_all(self) -> list[int]:
        """Wait for the end and return all remaining tokens; the caller is woken once, not for each token."""
        self._wakes_at_end = True
        return [token async for chunk in self for token in chunk]

    async def __aenter__(self) -> Self:
        """Enter at once: the request was sent already."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel the generation unless it has ended, so that the replica's slot is freed."""
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the generation unless it has ended."""
        if not self._is_over:
            self._is_over = True
            self._cancel()

    def add(self, token: int) -> None:
        """Add a token that has arrived."""
        self._tokens.append(token)
        if not self._wakes_at_end:
            self._changed.set()

    def finish(self, reason: FinishReason) -> None:
        """Mark the generation as ended by itself."""
        self.finish_reason = reason
        self._is_over = True
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """Mark it as failed; the iteration raises the error after the tokens that arrived before."""
        self._error = error
        self._is_over = True
        self._changed.set()


class SocketLink:
    """Concurrent requests to one replica over one socket."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        facts: ReplicaFacts,
        answer_timeout_s: float,
        ids: Iterator[str] | None = None,
    ) -> None:
        """Call `open` instead. `ids`: names for requests, where the replica has other callers too."""
        self.facts = facts
        self._answer_timeout_s = answer_timeout_s
        self._writer = writer
        self._ids = ids or map(str, count())
        self._generations: dict[str, TokenStream] = {}
        self._embeddings: dict[str, ArrivingEmbeddings] = {}
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._lost: ReplicaLost | None = None
        self._read_task = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, stream: socket.socket, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> Self:
        """Wait until the replica has loaded its base model. Raises `ReplicaRefused` if it cannot, or `ReplicaLost`.

        `answer_timeout_s`: time limit of every operation but a generation.
        """
        reader, writer = await asyncio.open_connection(sock=stream, limit=MAX_FRAME_BYTES)
        try:
            frame = await read_frame(reader)
            if "refused" not in frame:
                return cls(reader, writer, ReplicaFacts(**frame["ready"]), answer_timeout_s)
        except BaseException:
            writer.close()
            raise
        writer.close()
        raise ReplicaRefused(frame["refused"])

    @property
    def in_flight(self) -> int:
        """Number of generations and requests for embeddings that have not ended."""
        return len(self._generations) + len(self._embeddings)

    @property
    def is_lost(self) -> bool:
        """Whether the replica is lost."""
        return self._lost is not None

    async def load(self, adapter: str, path: Path, key: str | None = None) -> None:
        """Load the adapter directory, whose files `key` opens, under a name. Raises `ServingError`."""
        await self._call("load", adapter=adapter, path=str(path), key=key)

    async def unload(self, adapter: str) -> None:
        """Unload an adapter. Raises `ReplicaRefused` while requests use it."""
        await self._call("unload", adapter=adapter)

    async def stats(self) -> dict[str, int]:
        """Return counts: running, waiting, rows (slots), adapters, steps, generated_tokens, cache_bytes, pid..."""
        return await self._call("stats")

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Send a request at once and return its stream, whose iteration raises an error."""
        identifier = next(self._ids)
        generation = TokenStream(lambda: self._cancel(identifier))
        if self._lost is not None:
            generation.fail(ReplicaLost(str(self._lost)))
            return generation
        self._generations[identifier] = generation
        # Not `asdict`, which copies every token.
        arguments = {name: getattr(request, name) for name in FIELDS}
        self._send({"op": "generate", "id": identifier, **arguments})
        return generation

    async def embed(self, request: EmbedRequest) -> list[str]:
        """Embed texts: one vector each, as float32 numbers in Base64. Raises `ServingError`."""
        if self._lost is not None:
            raise ReplicaLost(str(self._lost))
        identifier = next(self._ids)
        arriving = self._embeddings[identifier] = ArrivingEmbeddings(len(request.texts))
        arguments = {name: getattr(request, name) for name in EMBED_FIELDS}
        self._send({"op": "embed", "id": identifier, **arguments})
        try:
            return await arriving.complete
        finally:
            del self._embeddings[identifier]
            if arriving.complete.cancelled() and self._lost is None:
                self._send({"op": "cancel", "id": identifier})

    async def aclose(self) -> None:
        """Close the socket, which ends the replica; requests in flight fail with `ReplicaLost`."""
        self._read_task.cancel()
        self._fail_all(ReplicaLost("the connection was closed"))
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def wait_lost(self) -> ReplicaLost:
        """Return when the replica is lost, so that the caller can replace it."""
        await asyncio.wait([self._read_task])
        return self._lost or ReplicaLost("the connection was closed")

    async def _call(self, operation: str, **arguments: str | None) -> dict[str, Any]:
        if self._lost is not None:
            raise ReplicaLost(str(self._lost))
        identifier = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._answers[identifier] = answer
        self._send({"op": operation, "id": identifier, **arguments})
        try:
            async with asyncio.timeout(self._answer_timeout_s):
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

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await read_frame(reader)
                self._handle(frame)
        except ReplicaLost as lost:
            self._fail_all(lost)
        except (KeyError, TypeError, ValueError) as error:
            self._fail_all(ReplicaLost(f"the replica broke the protocol: {type(error).__name__}"))
        finally:
            if self._lost is None:  # cancelled: nobody reads the answers that others wait for
                self._fail_all(ReplicaLost("the connection was closed"))

    def _handle(self, frame: dict[str, Any]) -> None:
        """Pass on the tokens of a step, or else the answer to one request."""
        if "tokens" in frame:
            self._pass_on(frame)
            return
        if "embedded" in frame:
            for identifier, number, vector in frame["embedded"]:
                if identifier in self._embeddings:
                    self._embeddings[identifier].add(number, vector)
            return
        identifier, fault = frame["id"], frame.get("error")
        waiting = self._generations.pop(identifier, None) or self._embeddings.get(identifier)
        if waiting is not None:
            refused = RequestTooLarge if frame.get("too_large") else ReplicaRefused
            refused = UnusableGrammar if frame.get("grammar") else refused
            error = ReplicaLost if frame.get("lost") else refused
            waiting.fail(error(fault))
        elif (answer := self._answers.get(identifier)) is not None and not answer.done():
            if fault is None:
                answer.set_result({key: frame[key] for key in frame.keys() - {"id", "ok"}})
            else:
                answer.set_exception(ReplicaRefused(fault))

    def _pass_on(self, frame: dict[str, Any]) -> None:
        """Pass on the tokens of a step, after their scores. Unknown ids were cancelled in the meantime."""
        running = self._generations
        for identifier, scores in frame.get("prompt_scores", ()):
            if identifier in running:
                running[identifier].prompt_scores += [_score_of(*score) for score in scores]
        for identifier, score in frame.get("scores", ()):
            if identifier in running:
                running[identifier].scores.append(_score_of(*score))
        for identifier, token in frame["tokens"]:
            if (generation := running.get(identifier)) is not None:
                generation.add(token)
        for identifier, reason in frame["finished"]:
            if (generation := running.pop(identifier, None)) is not None:
                generation.finish(FinishReason(reason))

    def _fail_all(self, lost: ReplicaLost) -> None:
        self._lost = lost
        for generation in self._generations.values():
            generation.fail(ReplicaLost(str(lost)))  # one each, since each is raised elsewhere
        self._generations.clear()
        for arriving in self._embeddings.values():
            arriving.fail(ReplicaLost(str(lost)))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ReplicaLost(str(lost)))
        # Not `close`, which would wait for a replica that hangs and reads nothing.
        self._writer.transport.abort()


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Wait for a frame. Raises `ReplicaLost` when the connection ends, and `ValueError` for invalid data."""
    try:
        line = await reader.readline()
    except OSError as error:  # a `ConnectionError`, or one of TLS or of a time limit of the kernel
        raise ReplicaLost("the connection to the replica broke") from error
    if not line.endswith(b"\n"):
        raise ReplicaLost("the replica's process ended")
    return json.loads(line)


def _score_of(token: int, logprob: float, top: list[list[float]]) -> TokenScore:
    # As tuples, which the garbage collector stops looking at: there may be tens of thousands.
    return TokenScore(token, logprob, tuple(tuple(pair) for pair in top))
