"""The two channels between the training process and its supervisor: progress out, a request to stop in.

Progress is one JSON object a line and never holds dataset text. Knows nothing of models; torch-free.
Next: `training_loop.py` (writes progress), `tuneship/service/jobs/record_progress.py` (reads it).
"""

import json
import os
import signal
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from tuneship.host.deadline_file import is_past

POLL_SECONDS = 0.2
# Exit code of a process whose lease is over.
LEASE_OVER = 75
# How long a stop waits for the end of the current step before the process exits.
GRACE_SECONDS = 2.0

# Advice to the owner of a job that ended with `out_of_memory`.
NEEDS_LESS_MEMORY = (
    "a smaller lora_rank or batch_size, shorter examples or a smaller base model need less"
)


class Reason(StrEnum):
    """Why a job failed; the same words as in the job's record."""

    MAX_RUNTIME_EXCEEDED = "max_runtime_exceeded"
    OUT_OF_MEMORY = "out_of_memory"
    LOSS_NOT_FINITE = "loss_not_finite"
    DATA_UNREADABLE = "data_unreadable"
    INTERNAL = "internal"


class TrainingFailed(Exception):
    """Training cannot continue; `message` is shown to the owner of the job and quotes no data."""

    def __init__(self, reason: Reason, message: str) -> None:
        """`message`: one sentence without any text of the dataset."""
        super().__init__(message)
        self.reason = reason
        self.message = message


class TrainingCancelled(Exception):
    """A stop was requested, and the process has reached a point where it can stop."""


class RankLost(Exception):
    """A worker rank ended without being stopped by rank 0."""

    def __init__(self, rank: int, exit_code: int) -> None:
        """`exit_code` is negative for a signal."""
        super().__init__(f"the process of rank {rank} ended with {exit_code}")
        self.exit_code = exit_code


class ProgressFile:
    """Appends whole lines, from any thread; after the line that says how the job ended, none follows."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending: an earlier attempt may have written there."""
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._is_ended = False
        self.step = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Write one line of the given kind."""
        with self._lock:
            self._write(kind, fields)

    def log(self, level: Literal["debug", "info", "warning", "error"], message: str) -> None:
        """Write a line of the job's log. `message` holds counts and names, never data."""
        self.write("log", level=level, message=message)

    def end(self, kind: Literal["completed", "failed", "cancelled"], **fields: Any) -> None:
        """Write the last line; later calls write none. Unless it is a success, it says after which step it came."""
        with self._lock:
            at = {} if kind == "completed" else {"at_step": self.step}
            self._write(kind, {**fields, **at})
            self._is_ended = True

    def close(self) -> None:
        """Close the file; each line was flushed when it was written."""
        self._file.close()

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if self._is_ended:
            return
        if kind == "step":
            self.step = fields["step"]
        self._file.write(json.dumps({"kind": kind, **fields}, allow_nan=False) + "\n")
        self._file.flush()


class StopRequest:
    """A request to stop: SIGTERM, the appearance of the cancel file, or a lease that is over."""

    def __init__(self, cancel_file: Path, lease_file: Path | None = None) -> None:
        """Until `watch` is called, a request is noticed by `raise_if_requested` alone.

        `lease_file`: holds a deadline, if there is one. After it the process ends at once, without a line: another
        attempt may compute.
        """
        self._cancel_file = cancel_file
        self._lease_file = lease_file
        self._signalled = threading.Event()

    def raise_if_requested(self) -> None:
        """Raise TrainingCancelled if a stop was requested.

        Called where the work can stop: after a step, and between the micro-batches of an evaluation.
        """
        if self._signalled.is_set() or self._cancel_file.exists():
            raise TrainingCancelled

    def watch(self, progress: ProgressFile) -> None:
        """Start a thread that ends the process soon after a stop request, even during an import or a long step.

        SIGTERM is blocked in every thread, and the watching thread polls whether it is pending: a Python handler
        would wait for the end of the running C call. Call it before other threads start.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._watch, args=[progress], daemon=True).start()

    def _watch(self, progress: ProgressFile) -> None:
        # Not `sigtimedwait`: in a process that was stopped meanwhile, CPython returns a signal that never came.
        while not (self._cancel_file.exists() or signal.SIGTERM in signal.sigpending()):
            if self._lease_file is not None and is_past(self._lease_file):
                os._exit(LEASE_OVER)
            time.sleep(POLL_SECONDS)
        self._signalled.set()
        time.sleep(GRACE_SECONDS)
        progress.end("cancelled")
        os._exit(0)
