"""Replacements for worker processes: replicas that answer over their socket, and trainers that a test controls.

Both follow the protocols of the real workers: `tuneship/processes/worker_protocol.py`, the messages of
`tuneship/serving/replica_client.py`, and the progress file of `tuneship/training/`. No process is started.
"""

import base64
import json
import os
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tuneship.processes.worker_protocol import Worker, WorkerSpec
from tuneship.replicas.replica import CHECK_TOKENS
from tuneship.security.sealed_files import write_sealed
from tuneship.training.spec import Order


class PlayedWorker:
    """A worker whose exit code is set by the test."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.pid = os.getpid()
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.code = self.code if self.code is not None else -signal.SIGTERM

    def kill(self) -> None:
        self.code = self.code if self.code is not None else -signal.SIGKILL


class PlayedTrainer(PlayedWorker):
    """A trainer that writes progress when the test asks for it."""

    # The model's chat template; it leaves out answers, which only training and scored prompts have.
    template = b"{{ messages[0].content }}"

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._line = os.dup(spec.inherited[0])
        if "--wait" not in spec.arguments:
            _ = self.order  # read the order, which has been sent, while the pipe is open: tests ask killed trainers too

    def kill(self) -> None:
        super().kill()
        line, self._line = self._line, -1
        if line >= 0:
            os.close(line)

    @cached_property
    def order(self) -> Order:
        """The order for its job; a trainer that was started in advance waits until it gets one."""
        line, self._line = (
            self._line,
            -1,
        )  # if it is never read, `kill` or the end of the process closes it
        with os.fdopen(line) as opened:
            order = Order.from_line(opened.readline())
        assert order is not None
        return order

    @property
    def folder(self) -> Path:
        return self.order.folder

    def say(self, *lines: dict[str, Any]) -> None:
        with (self.folder / "progress.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def start_of(self, steps: int, resumed_from: int = 0) -> None:
        self.say(
            {
                "kind": "started",
                "total_steps": steps,
                "total_epochs": 1,
                "training_examples": 4,
                "validation_examples": 1,
                "trainable_parameters": 10,
                "resumed_from_step": resumed_from,
            }
        )

    def step(self, number: int, loss: float = 1.0, evaluated: bool = False) -> None:
        self.say(
            {
                "kind": "step",
                "step": number,
                "epoch": number / 10,
                "current_epoch": 1,
                "training_loss": loss,
                "learning_rate": 1e-4,
                "validation_loss": loss,
                "accuracy": 0.5,
                "perplexity": 2.0,
                "evaluated": evaluated,
            }
        )

    def end_early(self, step: int, best_step: int, patience: int) -> None:
        self.say(
            {"kind": "ended_early", "step": step, "best_step": best_step, "patience": patience}
        )

    def epoch(self, number: int, loss: float = 1.0) -> None:
        losses = {"training_loss": loss, "validation_loss": loss}
        self.say({"kind": "epoch", "epoch": number, **losses})

    def complete(self, end: bool = True) -> None:
        adapter = self.folder / "output" / "adapter"
        adapter.mkdir(parents=True)
        files = {
            "adapter_config.json": b"{}",
            "adapter_model.safetensors": b"weights",
            "chat_template.jinja": self.template,
        }
        for name, content in files.items():
            write_sealed(adapter / name, self.order.keys.adapter, content)
        self.say(
            {
                "kind": "completed",
                "adapter_dir": str(adapter),
                "best_step": 2,
                "validation_loss": 0.5,
                "ends_learnt": 0.99,
                "appended_end": None,
            }
        )
        if end:
            self.code = 0


class PlayedReplica(PlayedWorker):
    """A replica that answers every generation with the same tokens as soon as the test allows it."""

    def __init__(self, spec: WorkerSpec, engines: "PlayedEngines") -> None:
        super().__init__(spec)
        self.engines = engines
        self.adapters: set[str] = set()
        self.running: dict[str, str | None] = {}
        self.hangs = False
        self._lock = threading.Lock()
        self._socket = socket.socket(fileno=os.dup(spec.inherited[0]))
        threading.Thread(target=self._serve, daemon=True).start()

    def kill(self) -> None:
        super().kill()
        with suppress(OSError):  # it may already have closed the connection
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, frame: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(frame).encode() + b"\n")

    def _serve(self) -> None:
        facts = {"pid": 1, "parameters": 1, "context_length": 512, "vocabulary": 9, "dtype": "f"}
        with (
            self._socket,
            self._socket.makefile("rb") as lines,
            suppress(OSError),
        ):  # the service has disconnected
            self.engines.may_start.wait(120)
            if self.engines.fault:
                self._send({"refused": self.engines.fault})
                return
            self._send({"ready": facts})
            for line in lines:
                self._obey(json.loads(line))
        self.code = self.code if self.code is not None else 0

    def _obey(self, frame: dict[str, Any]) -> None:
        name, adapter = frame["id"], frame.get("adapter")
        if self.hangs:
            return
        if frame["op"] == "generate":
            self._generate(name, frame)
            return
        if frame["op"] == "embed":
            self._embed(name, frame)
            return
        if frame["op"] == "cancel":
            self.running.pop(name, None)
            return
        if frame["op"] == "unload" and adapter in self.running.values():
            self._send({"id": name, "error": "in use"})
            return
        if frame["op"] == "stats":
            self.engines.probes += 1
            self.engines.may_probe.wait(120)
        elif frame["op"] == "load":
            self.engines.at_load(frame)
            self.adapters.add(frame["adapter"])
        elif frame["op"] == "unload":
            self.adapters.discard(adapter)
        rows = self.engines.rows
        stats = {"rows": rows, "waiting": max(0, len(self.running) - rows)}
        self.hangs = self.engines.hangs_after_loading and frame["op"] == "load"
        self._send({"id": name, "ok": True, **stats})

    def _generate(self, name: str, frame: dict[str, Any]) -> None:
        if tuple(frame["tokens"]) != CHECK_TOKENS:
            self.running[name] = frame["adapter"]
            self.engines.prompts.append(tuple(frame["tokens"]))
            self.engines.asked.append(frame)
            threading.Thread(target=self._write, args=(name, frame), daemon=True).start()
        elif self.engines.cannot_run == (frame["adapter"] or "the base"):
            self._send({"id": name, "error": "the model's output is not finite"})
        else:
            scores = played_scores(name, frame, [1], "length")
            end = {"finished": [[name, "length"]], "scores": scores}
            self._send({"tokens": [[name, 1]], **end})

    def _embed(self, name: str, frame: dict[str, Any]) -> None:
        """Answer with the vector that the test chose for the first text and zeros for the others, the last first."""
        self.engines.embedded.append(frame)
        self.engines.may_answer.wait(120)
        if self.engines.error is not None:
            self._send({"id": name, **self.engines.error})
            return
        numbers = self.engines.vector[: frame["dimensions"]]
        vectors = [numbers, *([0.0] * len(numbers) for _ in frame["texts"][1:])]
        for number, vector in reversed(list(enumerate(vectors))):
            content = base64.b64encode(array("f", vector).tobytes()).decode()
            self._send({"embedded": [[name, number, content]]})

    def _write(self, name: str, frame: dict[str, Any]) -> None:
        self.engines.may_answer.wait(120)
        if frame.get("adapter") is None:
            time.sleep(self.engines.base_model_pause_s)
        answer = self.engines.answer_to(frame)
        tokens = [[name, token] for token in answer[: frame["max_tokens"]]]
        reason = "stop" if len(tokens) == len(answer) else "length"
        first = self.engines.tokens_before_pause
        scores = played_scores(name, frame, [token for _, token in tokens], reason)
        with suppress(OSError):  # the service may have disconnected
            if self.engines.error is not None and self.running.pop(name, "gone") != "gone":
                self._send({"id": name, **self.engines.error})
                return
            if first and name in self.running:
                self._send({"tokens": tokens[:first], "finished": [], "scores": scores[:first]})
                self.engines.may_go_on.wait(120)
            if self.running.pop(name, "gone") != "gone":
                asked = played_prompt_scores(frame, self.engines.prompt_logprob_of)
                prompt = {"prompt_scores": [[name, asked]]} if asked else {}
                end = {"finished": [[name, reason]], "scores": scores[first:]}
                self._send({"tokens": tokens[first:], **end, **prompt})


def played_scores(
    name: str, frame: dict[str, Any], tokens: Sequence[int], reason: str
) -> list[Any]:
    """Scores of the tokens, and of the stop token behind them: -1/8, -2/8 and so on."""
    if frame.get("logprobs") is None:
        return []
    scored = [*tokens, *(frame["stop_tokens"][:1] if reason == "stop" else ())]
    return [
        [name, _played_score(token, -(number + 1) / 8, frame["logprobs"])]
        for number, token in enumerate(scored)
    ]


def played_prompt_scores(
    frame: dict[str, Any], logprob_of: Callable[[dict[str, Any]], float]
) -> list[Any]:
    """Scores of the prompt's tokens from the second on."""
    top = frame.get("prompt_logprobs")
    if top is None:
        return []
    logprob = logprob_of(frame)
    return [_played_score(one, logprob, top) for one in frame["tokens"][1:]]


def _played_score(token: int, logprob: float, top: int) -> list[Any]:
    others = [[other, logprob - other] for other in (token, *range(5, 25)) if other != token]
    return [token, logprob, [[token, logprob], *others][:top]]


class PlayedEngines:
    """A `Runtime` that starts played workers.

    While `may_answer`, `may_start` or `may_probe` is cleared, replicas wait before that action. With `refusal`, no
    replica starts.
    """

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer = list(answer)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.may_start = threading.Event()
        self.may_start.set()
        self.may_probe = threading.Event()
        self.may_probe.set()
        self.probes = 0
        self.fault = ""
        # The adapter (or `the base`) that loads, but whose outputs are not finite.
        self.cannot_run = ""
        # Whether a replica stops answering once it has loaded an adapter.
        self.hangs_after_loading = False
        # The number of requests that a replica claims to run at once.
        self.rows = 32
        # The number of tokens that are sent at first; the others follow when `may_go_on` is set.
        self.tokens_before_pause = 0
        self.may_go_on = threading.Event()
        # Seconds before each answer of a model without an adapter, for tests that compare latencies.
        self.base_model_pause_s = 0.0
        # The error that every start of a training raises, if any.
        self.start_error: Exception | None = None
        # Whether every new training completes by itself, for tests that do not control it.
        self.trains_at_once = False
        self.prompts: list[tuple[int, ...]] = []
        # Whether a replica repeats each prompt instead of giving the answer.
        self.answers_with_prompt = False
        # Called with each message that asks for an adapter, while its files are there.
        self.at_load: Callable[[dict[str, Any]], object] = lambda _: None
        # The frames with which generations were requested.
        self.asked: list[dict[str, Any]] = []
        # The log probability of each token of a prompt that is to be scored.
        self.prompt_logprob_of: Callable[[dict[str, Any]], float] = lambda _: -1.0
        # The embedding of the first text of every request.
        self.vector = [0.5, -0.5, 0.25, 1.0]
        # The frames with which embeddings were requested.
        self.embedded: list[dict[str, Any]] = []
        # The error that answers every generation instead of tokens, if any.
        self.error: dict[str, Any] | None = None
        self.replicas: list[PlayedReplica] = []
        self.trainers: list[PlayedTrainer] = []
        # The modules whose libraries were asked for beforehand.
        self.preloaded: list[str] = []

    def answer_to(self, frame: dict[str, Any]) -> Sequence[int]:
        """Return the tokens that answer a request; a test may replace it."""
        return frame["tokens"] if self.answers_with_prompt else self.answer

    def preload(self, module: str) -> None:
        self.preloaded.append(module)

    def close(self) -> None:
        """Do nothing: there is no fork server."""

    def start(self, spec: WorkerSpec) -> Worker:
        if self.start_error is not None and spec.module == "tuneship.training":
            raise self.start_error
        if spec.module == "tuneship.serving":
            self.replicas.append(PlayedReplica(spec, self))
            return self.replicas[-1]
        trainer = PlayedTrainer(spec)
        self.trainers.append(trainer)
        if self.trains_at_once:
            trainer.start_of(1)
            trainer.step(1)
            trainer.complete()
        return trainer
