"""The frames of a replica process, byte for byte, and how it ends."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.repeats import variants
from tests.support.waiting import until
from tests.unit.serving.conftest import ENDLESS_TOKENS, PATIENCE_S, spawn
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.replica import Frames, ReplicaServer, load_model

pytestmark = pytest.mark.slow

GENERATE = {"op": "generate", "adapter": None, "tokens": [9, 8, 7], "max_tokens": 4, "temperature": 0.0, "top_p": 1.0,
            "seed": None, "stop_tokens": [], "queue": "", "owner": ""}  # fmt: skip


@dataclass
class Wire:
    """Raw frames to and from a process."""

    process: subprocess.Popen[bytes]
    stream: socket.socket
    lines: Iterator[bytes]

    def send(self, **frame: object) -> None:
        self.stream.sendall(json.dumps(frame).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        return json.loads(next(self.lines))


@pytest.fixture
def wire(base: Path) -> Iterator[Wire]:
    with connected(base) as wire:
        yield wire


@contextmanager
def connected(model: Path) -> Iterator[Wire]:
    ours, process = spawn(model, stderr=subprocess.PIPE)
    # The process imports torch first, perhaps on a busy machine.
    ours.settimeout(PATIENCE_S)
    with process:
        with ours, ours.makefile("rb") as lines:
            yield Wire(process, ours, lines)
        process.kill()


def test_a_ready_replica_introduces_itself_once(wire: Wire) -> None:
    assert wire.receive()["ready"] == {
        "pid": wire.process.pid,
        "parameters": 26944,
        "context_length": 256,
        "vocabulary": 261,
        "dtype": "float32",
    }


def test_one_frame_a_step_carries_the_tokens_of_all_requests(wire: Wire) -> None:
    wire.receive()
    wire.stream.sendall(
        b"".join(json.dumps({**GENERATE, "id": name}).encode() + b"\n" for name in "ab")
    )
    frames = [wire.receive() for _ in range(4)]
    assert all({identifier for identifier, _ in frame["tokens"]} == {"a", "b"} for frame in frames)
    assert [frame["finished"] for frame in frames[:3]] == [[], [], []]
    assert sorted(frames[3]["finished"]) == [["a", "length"], ["b", "length"]]


@pytest.mark.parametrize(
    "frame",
    variants(
        [
            {"op": "dance"},
            {**GENERATE, "tokens": [1.5]},
            {**GENERATE, "adapter": ["a"]},
            {"op": "load", "adapter": "a"},
            {**GENERATE, "tokens": "abc"},
            {**GENERATE, "seed": {}},
            {**GENERATE, "max_tokens": None},
        ],
        each_commit=3,
    ),
)
def test_a_frame_that_makes_no_sense_is_answered_and_harms_nobody(
    wire: Wire, frame: dict[str, object]
) -> None:
    wire.receive()
    wire.send(**frame, id="odd")
    answer = wire.receive()
    assert answer["id"] == "odd"
    assert answer["error"]
    wire.send(**GENERATE, id="even")
    assert wire.receive()["tokens"][0][0] == "even"


def test_a_failure_of_the_engine_is_reported_to_every_request_and_ends_the_process(
    long_base: Path,
) -> None:
    with connected(long_base) as wire:
        wire.receive()
        requests = [{**GENERATE, "id": name, "max_tokens": ENDLESS_TOKENS} for name in "ab"]
        wire.stream.sendall("".join(json.dumps(request) + "\n" for request in requests).encode())
        wire.receive()
        wire.stream.sendall(b"this is no frame\n")
        errors = {}
        for line in wire.lines:
            frame = json.loads(line)
            if "error" in frame:
                errors[frame["id"]] = frame["error"]
        assert errors == dict.fromkeys("ab", "the engine failed: JSONDecodeError")
        assert wire.process.wait(PATIENCE_S) != 0


def test_a_termination_signal_ends_an_idle_process(wire: Wire) -> None:
    wire.receive()
    wire.process.send_signal(signal.SIGTERM)
    assert wire.process.wait(PATIENCE_S) == 0


Ask = Callable[[dict[str, Any], int], dict[str, Any]]


@contextmanager
def served(engine: Engine, **options: float) -> Iterator[Ask]:
    """Serve an engine in a thread. The result asks it, and returns the last of this many frames."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    server = ReplicaServer(engine, Frames(theirs), **options)
    worker = threading.Thread(target=server.run, daemon=True)
    worker.start()
    with ours, theirs, ours.makefile("rb") as lines:

        def ask(frame: dict[str, Any], frames: int) -> dict[str, Any]:
            ours.sendall(json.dumps(frame).encode() + b"\n")
            return [json.loads(next(lines)) for _ in range(frames)][-1]

        yield ask
        ours.shutdown(socket.SHUT_RDWR)
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


def test_a_cache_is_given_back_when_nobody_has_asked_for_a_while(base: Path) -> None:
    engine = Engine(load_model(base), EngineLimits(kept_bytes=0))
    generate, stats = {**GENERATE, "id": "a"}, {"op": "stats", "id": "b"}
    with served(engine) as ask:
        assert ask(generate, 4)["finished"]
        assert ask(stats, 1)["cache_bytes"], "the next turn of a conversation needs it"
    with served(engine, shrink_after_idle_s=0.2) as ask:
        until(lambda: not ask(stats, 1)["cache_bytes"])
        assert ask(generate, 4)["finished"]
        # This must happen without a request that wakes it up.
        until(lambda: not engine.stats()["cache_bytes"])


def test_a_gateway_that_goes_without_reading_is_one_that_has_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        frames = Frames(theirs)
        frames.send({"unread": True})
        ours.close()
        assert list(frames.receive(None)) == []
        assert frames.closed
        frames.close()
