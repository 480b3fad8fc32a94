"""The replica process between its socket and its engine: newline-delimited JSON frames in, frames out.

Between two steps it reads the frames that have arrived, without waiting; only an idle engine waits for the socket, and
frees memory when it has waited for long. `replica_client` is the other end.
"""

import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from operator import index
from pathlib import Path
from typing import Any

from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.embed_request import EmbedRequest, Pooling, texts_of
from tuneship.serving.embeddings import Embedder
from tuneship.serving.engine import Engine, RequestRefused, SequenceTooLarge
from tuneship.serving.malloc import release_free_memory
from tuneship.serving.models import llama
from tuneship.serving.models.linear import AS_MEASURED, Packing
from tuneship.serving.models.model import CausalModel, ModelRefused, read_config
from tuneship.serving.replica_client import PROMPT_SCORES_PER_FRAME
from tuneship.serving.sampling.grammar_turns import GrammarTurns
from tuneship.serving.sampling.guides import GrammarCompiler, GrammarRefused
from tuneship.serving.sequence import GenerateRequest
from tuneship.serving.weights import QUANTISED

Frame = dict[str, Any]
_RECEIVE_BYTES = 1 << 18
# The KV cache is freed after this long without a request: the next turn of a conversation comes
# sooner.
SHRINK_AFTER_IDLE_S = 60.0
TOO_COMPLEX = "is too complex to follow"
# Embeddings per frame, for the same reason as `PROMPT_SCORES_PER_FRAME`: the largest models have vectors of up to 90 kB
# in Base64.
EMBEDDINGS_PER_FRAME = 8
# Adapter moves in memory before malloc_trim, which takes about 20 ms.
MOVES_PER_TRIM = 8


class Frames:
    """JSON objects, one a line, over a blocking stream socket."""

    def __init__(self, stream: socket.socket) -> None:
        """Take over the socket."""
        self._stream = stream
        self._rest = b""
        self._woken, self._waker = socket.socketpair()
        self.closed = False

    def receive(self, timeout_s: float | None) -> Iterator[Frame]:
        """Yield the frames that have arrived; wait up to `timeout_s` for the first, None: until the socket closes."""
        sockets = [self._stream, self._woken]
        while not self.closed and (ready := select.select(sockets, [], [], timeout_s)[0]):
            timeout_s = 0
            if self._woken in ready:
                self._woken.recv(_RECEIVE_BYTES)
            if self._stream not in ready:
                continue
            try:
                data = self._stream.recv(_RECEIVE_BYTES)
            except ConnectionResetError:  # it closed with unread frames
                data = b""
            self.closed = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def wake(self) -> None:
        """End a wait in `receive`; may be called by any thread."""
        self._waker.send(b".")

    def close(self) -> None:
        """Close the descriptor of `wake`; nobody may call it afterwards. The stream belongs to the caller."""
        self._woken.close()
        self._waker.close()

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame; if the other end is gone, `closed` is set."""
        try:
            self._stream.sendall(json.dumps(frame, separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True


class ReplicaServer:
    """Handles frames with an engine until the service closes the socket."""

    def __init__(
        self,
        engine: Engine,
        frames: Frames,
        shrink_after_idle_s: float = SHRINK_AFTER_IDLE_S,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """`run` does the work; without `compiler`, requests with a grammar are refused."""
        self._grammars = None if compiler is None else GrammarTurns(compiler, frames.wake)
        self._engine = engine
        self._embedder = Embedder(engine)
        self._frames = frames
        self._shrink_after_idle_s = shrink_after_idle_s
        self._trimmed_at = -MOVES_PER_TRIM  # trims what loading the model left behind, too
        self._worked_at = time.monotonic()
        self._operations: dict[str, Callable[[Frame], Frame | None]] = {
            "load": self._load,
            "unload": self._unload,
            "generate": self._generate,
            "embed": self._embed,
            "cancel": self._cancel,
            "stats": self._stats,
        }

    def run(self) -> None:
        """Handle frames and run steps until the socket closes; if the engine fails, answer all requests and raise."""
        try:
            while not self._frames.closed:
                shrink_at = self._worked_at + self._shrink_after_idle_s
                timeout_s: float | None = 0
                if self._is_idle:
                    # Until the KV cache is to be freed, and without end when that would free nothing.
                    is_shrunk = self._engine.is_shrunk
                    timeout_s = None if is_shrunk else max(0, shrink_at - time.monotonic())
                for frame in self._frames.receive(timeout_s):
                    self._handle(frame)
                self._submit_compiled()
                if not self._is_idle:
                    self._step()
                elif time.monotonic() >= shrink_at:
                    self._engine.shrink()
                # While nobody waits for it: otherwise each adapter leaves a hole of its size.
                if self._is_idle and self._engine.moves - self._trimmed_at >= MOVES_PER_TRIM:
                    self._trimmed_at = self._engine.moves
                    release_free_memory()
        except Exception as error:
            message = f"the engine failed: {type(error).__name__}"
            uncompiled = () if self._grammars is None else self._grammars.requests
            waiting = (*self._engine.requests, *uncompiled, *self._embedder.requests)
            for identifier in waiting:
                self._frames.send({"id": identifier, "error": message, "lost": True})
            raise
        finally:
            if self._grammars is not None:
                self._grammars.close()
            self._frames.close()

    @property
    def _is_idle(self) -> bool:
        return self._engine.idle and self._embedder.idle

    def _stats(self, _frame: Frame) -> Frame:
        counts = self._engine.stats()
        return {
            **counts,
            "waiting": counts["waiting"] + self._embedder.waiting,
            "pid": os.getpid(),
        }

    def _handle(self, frame: Frame) -> None:
        identifier = frame.get("id")
        try:
            answer = self._operations[frame["op"]](frame)
        except (AdapterRefused, GrammarRefused, RequestRefused) as error:
            self._refuse(identifier, error)
        except (KeyError, TypeError, ValueError) as error:
            self._frames.send(
                {"id": identifier, "error": f"frame not understood: {type(error).__name__}"}
            )
        else:
            if answer is not None:
                self._frames.send({"id": identifier, "ok": True, **answer})

    def _refuse(self, identifier: Any, error: Exception) -> None:
        """Answer that a request was refused, and mark refusals that its caller can correct."""
        marks = {SequenceTooLarge: "too_large", GrammarRefused: "grammar"}
        mark = marks.get(type(error))
        self._frames.send({"id": identifier, "error": str(error), **({mark: True} if mark else {})})

    def _step(self) -> None:
        """Run a step of the sequences, then a pass over texts to embed."""
        has_sequences = not self._engine.idle
        if has_sequences:
            result = self._engine.step()
            for identifier, message in result.failed:
                self._frames.send({"id": identifier, "error": message})
            for identifier in result.unfollowed:
                self._refuse(identifier, GrammarRefused(TOO_COMPLEX))
            for identifier, scores in result.prompt_scores:
                for start in range(0, len(scores), PROMPT_SCORES_PER_FRAME):
                    part = scores[start : start + PROMPT_SCORES_PER_FRAME]
                    self._frames.send(
                        {"tokens": [], "finished": [], "prompt_scores": [[identifier, part]]}
                    )
            if result.tokens or result.finished:
                scored = {"scores": result.scores} if result.scores else {}
                self._frames.send({"tokens": result.tokens, "finished": result.finished, **scored})

        passed = self._embedder.step(is_beside_sequences=has_sequences)
        for start in range(0, len(passed.vectors), EMBEDDINGS_PER_FRAME):
            self._frames.send({"embedded": passed.vectors[start : start + EMBEDDINGS_PER_FRAME]})
        for identifier, message in passed.failed:
            self._frames.send({"id": identifier, "error": message})
        self._worked_at = time.monotonic()

    def _load(self, frame: Frame) -> Frame:
        self._engine.load(str(frame["adapter"]), Path(frame["path"]), frame.get("key"))
        return {}

    def _unload(self, frame: Frame) -> Frame:
        self._engine.unload(str(frame["adapter"]))
        return {}

    def _generate(self, frame: Frame) -> None:
        request = GenerateRequest(
            tokens=tuple(map(index, frame["tokens"])),
            max_tokens=index(frame["max_tokens"]),
            adapter=frame["adapter"],
            temperature=float(frame["temperature"]),
            top_p=float(frame["top_p"]),
            seed=frame["seed"],
            stop_tokens=tuple(map(index, frame["stop_tokens"])),
            queue=str(frame["queue"]),
            owner=str(frame["owner"]),
            logprobs=_count(frame.get("logprobs")),
            prompt_logprobs=_count(frame.get("prompt_logprobs")),
            grammar=frame.get("grammar"),
            is_background=bool(frame.get("is_background", False)),
        )
        identifier = str(frame["id"])
        if request.grammar is None:
            self._engine.submit(identifier, request)
            return
        if self._grammars is None:
            raise GrammarRefused("is not supported by this replica")
        self._grammars.add(identifier, request)

    def _submit_compiled(self) -> None:
        """Queue the requests whose grammars have been compiled."""
        if self._grammars is None:
            return
        for identifier, request, guide in self._grammars.compiled():
            if isinstance(guide, GrammarRefused):
                self._refuse(identifier, guide)
                continue
            try:
                self._engine.submit(identifier, request, guide)
            except RequestRefused as error:
                self._refuse(identifier, error)

    def _cancel(self, frame: Frame) -> None:
        identifier = str(frame["id"])
        if self._grammars is not None:
            self._grammars.cancel(identifier)
        self._engine.cancel(identifier)
        self._embedder.cancel(identifier)

    def _embed(self, frame: Frame) -> None:
        dimensions = frame["dimensions"]
        request = EmbedRequest(
            texts=texts_of(frame["texts"]),
            adapter=frame["adapter"],
            pooling=Pooling(frame["pooling"]),
            dimensions=None if dimensions is None else index(dimensions),
            owner=str(frame["owner"]),
            is_background=bool(frame.get("is_background", False)),
        )
        self._embedder.submit(str(frame["id"]), request)


def _count(value: Any) -> int | None:
    """A number of alternatives. Raises `TypeError` and `ValueError`."""
    if value is not None and index(value) < 0:
        raise ValueError("a number of alternatives is below 0")
    return value


def load_model(
    directory: Path, weights: str | None = None, packing: Packing = AS_MEASURED
) -> CausalModel:
    """Load a base model with the fastest implementation that supports it. Raises `ModelRefused`.

    `weights`: `float32`, `bfloat16`, `int8` or `int4`; None: one of the first two, by size and machine.
    """
    config = read_config(directory)
    if llama.supports(config):
        return llama.LlamaModel(directory, config, weights, packing)
    if weights in QUANTISED:
        kinds = ", ".join(sorted(llama.KINDS))
        raise ModelRefused(
            f"weights in {weights} are served for {kinds} models with usual settings only"
        )
    from tuneship.serving.models.generic import GenericModel  # noqa: PLC0415 (transformers takes seconds to import)

    return GenericModel(directory, weights, packing)
