"""The real engine, trainings and conversions as threads of the test's process: no process loads torch again."""

import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tuneship.conversion.order import ProcessMessage
from tuneship.conversion.running import A_DAY, MODULES, ConversionLimits
from tuneship.processes.worker_protocol import Worker, WorkerSpec
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.models.model import ModelRefused
from tuneship.serving.replica import Frames, ReplicaServer, load_model
from tuneship.serving.sampling.guides import GrammarCompiler
from tuneship.training.__main__ import failure_of
from tuneship.training.progress_file import ProgressFile, StopRequest, TrainingCancelled
from tuneship.training.spec import CANCEL_FILE, PROGRESS_FILE, SPEC_FILE, Order, TrainingSpec
from tuneship.training.training_loop import train

R = TypeVar("R", bound=ProcessMessage)


class ThreadWorker:
    """A worker whose work is a function in a thread."""

    def __init__(self, work: Callable[[], int], end: Callable[[], object]) -> None:
        """`end` has the work end soon."""
        self.pid = os.getpid()
        self._code: int | None = None
        self._end = end
        self._thread = threading.Thread(target=self._run, args=[work], daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], int]) -> None:
        code = -signal.SIGKILL
        try:
            code = work()
        finally:
            self._code = code

    def exit_code(self) -> int | None:
        return self._code

    def stop(self) -> None:
        # Its folder or its socket may be gone with its work.
        with suppress(OSError):
            self._end()

    def kill(self) -> None:
        self.stop()


class RealWorkers:
    """Runs each worker as its process would. Obeys `Runtime`."""

    def start(self, spec: WorkerSpec) -> Worker:
        # The starter closes its own copy.
        descriptor = os.dup(spec.inherited[0])
        if spec.module == "tuneship.training":
            folder = Path(spec.arguments[0])
            return ThreadWorker(lambda: _train(descriptor), (folder / CANCEL_FILE).touch)
        base = Path(spec.arguments[spec.arguments.index("--base") + 1])
        end = socket.socket(fileno=descriptor)
        return ThreadWorker(lambda: _serve(base, end), lambda: end.shutdown(socket.SHUT_RDWR))

    def preload(self, module: str) -> None:
        """Do nothing: everything is loaded."""

    def close(self) -> None:
        """Do nothing: threads end with their work."""


def _train(descriptor: int) -> int:
    with os.fdopen(descriptor) as line:
        order = Order.from_line(line.readline())
    assert order is not None
    spec = TrainingSpec.from_json((order.folder / SPEC_FILE).read_text())
    progress = ProgressFile(order.folder / PROGRESS_FILE)
    try:
        train(spec, order.keys, progress, StopRequest(order.folder / CANCEL_FILE))
    except TrainingCancelled:
        progress.end("cancelled")
    except Exception as error:  # noqa: BLE001 - as the process does
        failure = failure_of(error)
        progress.end("failed", reason=failure.reason.value, message=failure.message)
        return 1
    finally:
        progress.close()
    return 0


def _serve(base: Path, end: socket.socket) -> int:
    with end:
        frames = Frames(end)
        try:
            model = load_model(base)
        except ModelRefused as refusal:
            frames.send({"refused": str(refusal)})
            return 1
        facts = model.facts
        ready = {
            "pid": os.getpid(),
            "parameters": facts.parameters,
            "context_length": facts.context_length,
            "vocabulary": facts.vocabulary,
            "dtype": facts.weights,
        }
        frames.send({"ready": ready})
        compiler = GrammarCompiler(base, facts.vocabulary)
        ReplicaServer(Engine(model, EngineLimits()), frames, compiler=compiler).run()
    return 0


def convert_here(
    order: ProcessMessage,
    report: type[R],
    work: Path,
    readable: Sequence[Path],
    limits: ConversionLimits = A_DAY,
    *,
    module: str | None = None,
) -> R:
    """Carry out an order of `tuneship/conversion/` in this thread. Obeys `Convert`."""
    order_file, report_file = work / "order.json", work / "report.json"
    order.write(order_file)
    main: Any = importlib.import_module(module or MODULES[type(order)])
    if main.__name__ == "tuneship.conversion":
        main = importlib.import_module("tuneship.conversion.__main__")
    assert main.main(str(order_file), str(report_file)) == 0
    return report.read(report_file)
