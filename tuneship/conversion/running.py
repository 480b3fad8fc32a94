"""Runs the conversion processes, which read foreign files and need much memory, and waits for them."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tuneship.conversion.order import ExportOrder, ImportOrder, ProcessMessage, ReadingOrder
from tuneship.isolation.landlock import Places
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.processes.worker_protocol import WorkerSpec

R = TypeVar("R", bound=ProcessMessage)
MODULES: dict[type[ProcessMessage], str] = {
    ReadingOrder: "tuneship.conversion",
    ExportOrder: "tuneship.conversion.exporting",
    ImportOrder: "tuneship.conversion.importing",
}
POLL_S = 0.05
MAX_LAST_LINE_CHARACTERS = 300
# The end of a process's log that is looked at.
LOG_BYTES = 64 << 10


@dataclass(frozen=True)
class ConversionLimits:
    """How much a conversion may take, so that no caller's files keep a process for ever or fill the memory."""

    seconds: float
    # The most memory of its own that the process may allocate; 0: no limit.
    memory_bytes: int = 0
    # Whether nobody waits for it any more.
    is_stopped: Callable[[], bool] = lambda: False


# For an operator's command, which may read any model.
A_DAY = ConversionLimits(24 * 3600)


class ConversionFailed(Exception):
    """The process ended without a report, or was stopped; the message says how."""


class Convert(Protocol):
    """A function that runs a conversion order in a process of its own."""

    def __call__(
        self,
        order: ProcessMessage,
        report: type[R],
        work: Path,
        readable: Sequence[Path],
        limits: ConversionLimits,
    ) -> R:
        """The report on an order; its process may write `work` alone. Raises `ConversionFailed`, also when stopped."""
        ...


def convert_in_process(
    order: ProcessMessage,
    report: type[R],
    work: Path,
    readable: Sequence[Path],
    limits: ConversionLimits = A_DAY,
    *,
    module: str | None = None,
) -> R:
    """Carry out an order in a new process; implements `Convert`.

    The process is as isolated as the host allows (Linux with Landlock: no network, no other files of its user), and
    ends with this one.
    """
    order_file, report_file, log = work / "order.json", work / "report.json", work / "log"
    order.write(order_file)
    arguments = (str(order_file.absolute()), str(report_file.absolute()))
    spec = WorkerSpec(
        module or MODULES[type(order)],
        arguments,
        log,
        places=Places(tuple(readable), (work,)),
        memory_bytes=limits.memory_bytes,
    )
    end = time.monotonic() + limits.seconds
    worker = LocalProcesses(isolated=False).start(spec)
    try:
        while worker.exit_code() is None:
            if limits.is_stopped():
                raise ConversionFailed("it was stopped")
            if time.monotonic() > end:
                raise ConversionFailed(f"it took longer than {limits.seconds:.0f} s")
            time.sleep(POLL_S)
    finally:
        worker.kill()
    try:
        return report.read(report_file)
    except (OSError, ValueError):
        code = worker.exit_code() or 0
        why = "was killed, perhaps for its memory" if code == -signal.SIGKILL else "crashed"
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines() or [""]
        last = f": {lines[-1][:MAX_LAST_LINE_CHARACTERS]}" if lines[-1] else ""
        message = f"the process that reads the model {why} (exit code {code}){last}"
        raise ConversionFailed(message) from None
