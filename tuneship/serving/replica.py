"""The replica process between its socket and its engine: newline-delimited JSON frames in, frames out.

Between two steps it takes in whatever has arrived, without waiting; only an idle engine waits for the socket, and gives
memory back when it has waited for long. The other end is `line`.
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

from tuneship.serving import llama
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.engine import Engine, RequestRefused, SequenceTooLarge, StepResult
from tuneship.serving.malloc import give_back
from tuneship.serving.model import CausalModel, read_config
from tuneship.serving.sequence import GenerateRequest

Frame = dict[str, Any]
_CHUNK = 1 << 18
# Without a request, after which the cache is given back: the next turn of a conversation comes
# sooner.
REST_S = 60.0
# Of adapters in memory, before what they freed is given back: that takes some 20 ms.
MOVES_BORNE = 8


class Frames:
    """Whole frames of one JSON object a line over a blocking stream socket."""

    def __init__(self, stream: socket.socket) -> None:
        """Owns the socket."""
        self._stream = stream
        self._rest = b""
        self.closed = False

    def arrived(self, wait_s: float | None) -> Iterator[Frame]:
        """Frames that are there; waits so long for the first, None: until it comes or the other end closes."""
        while not self.closed and select.select([self._stream], [], [], wait_s)[0]:
            wait_s = 0
            try:
                data = self._stream.recv(_CHUNK)
            except ConnectionResetError:  # it went without reading what was sent to it
                data = b""
            self.closed = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def send(self, frame: Mapping[str, Any]) -> None:
        """A gateway that has gone closes the stream."""
        try:
            self._stream.sendall(json.dumps(frame, separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True


class ReplicaServer:
    """Answers frames with an engine until the gateway hangs up."""

    def __init__(self, engine: Engine, frames: Frames) -> None:
        """`run` does the work."""
        self._engine = engine
        self._frames = frames
        self._tidied_at = -MOVES_BORNE  # what loading the model left behind, too
        self._worked_at = time.monotonic()
        self._operations: dict[str, Callable[[Frame], Frame | None]] = {
            "load": self._load,
            "unload": self._unload,
            "generate": self._generate,
            "cancel": self._cancel,
            "stats": lambda _: {**self._engine.stats(), "pid": os.getpid()},
        }

    def run(self) -> None:
        """Until the socket closes. An exception is the engine's: all requests are told, then the process ends."""
        try:
            while not self._frames.closed:
                for frame in self._frames.arrived(self._patience()):
                    self._answer(frame)
                if not self._engine.idle:
                    self._report(self._engine.step())
                    self._worked_at = time.monotonic()
                elif time.monotonic() >= self._worked_at + REST_S:
                    self._engine.rest()
                self._tidy()
        except Exception as error:
            message = f"the engine failed: {type(error).__name__}"
            for identifier in self._engine.requests:
                self._frames.send({"id": identifier, "error": message, "lost": True})
            raise

    def _patience(self) -> float | None:
        if not self._engine.idle:
            return 0
        return None if self._engine.rested else max(0, self._worked_at + REST_S - time.monotonic())

    def _tidy(self) -> None:
        """Nothing waits for it; an adapter more then costs its own size and not its holes."""
        if self._engine.idle and self._engine.moves - self._tidied_at >= MOVES_BORNE:
            self._tidied_at = self._engine.moves
            give_back()

    def _answer(self, frame: Frame) -> None:
        identifier = frame.get("id")
        try:
            answer = self._operations[frame["op"]](frame)
        except SequenceTooLarge as refusal:
            self._frames.send({"id": identifier, "error": str(refusal), "too_large": True})
        except (AdapterRefused, RequestRefused) as refusal:
            self._frames.send({"id": identifier, "error": str(refusal)})
        except (KeyError, TypeError, ValueError) as error:
            self._frames.send(
                {"id": identifier, "error": f"frame not understood: {type(error).__name__}"}
            )
        else:
            if answer is not None:
                self._frames.send({"id": identifier, "ok": True, **answer})

    def _report(self, result: StepResult) -> None:
        for identifier, message in result.failed:
            self._frames.send({"id": identifier, "error": message})
        if result.tokens or result.finished:
            self._frames.send({"tokens": result.tokens, "finished": result.finished})

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
        )
        self._engine.submit(str(frame["id"]), request)

    def _cancel(self, frame: Frame) -> None:
        self._engine.cancel(str(frame["id"]))


def load_model(directory: Path, dtype: str = "auto") -> CausalModel:
    """The leanest implementation that takes the directory's architecture. Raises `ModelRefused`."""
    config = read_config(directory)
    if llama.supports(config):
        return llama.LlamaModel(directory, config, dtype)
    from tuneship.serving.generic import GenericModel  # noqa: PLC0415 (transformers takes seconds to import)

    return GenericModel(directory, dtype)
