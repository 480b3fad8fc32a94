"""One training process that waits with its libraries loaded, so that the next job begins seconds earlier.

It knows nothing of a job until it is handed one, does that one and ends: each job still has a process of its own.
It dies with the service like every worker, and by itself when the service's end of its pipe is closed.
Next: `local_launcher.py` (which hands out jobs), `tuneship/training/__main__.py` (the process).
"""

import logging
import os
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from tuneship.runtime.landlock import Places
from tuneship.runtime.worker_protocol import Runtime, Worker, WorkerSpec
from tuneship.training.spec import Order

logger = logging.getLogger(__name__)

# Pause after the service's start and after each start of a job, so that loading libraries does not slow down theirs.
SETTLE = timedelta(seconds=2)
# A process that dies while it waits is not replaced at once: there may be no memory for it.
AFTER_A_DEATH = timedelta(minutes=1)


def trainer_spec(arguments: tuple[str, ...], log: Path, pipe: int, places: Places) -> WorkerSpec:
    """A training process that reads its order from the file descriptor `pipe`."""
    return WorkerSpec("tuneship.training", arguments, log, inherited=(pipe,), places=places)


class WarmTrainer:
    """At most one waiting process."""

    def __init__(self, runtime: Runtime, log: Path, places: Places, now: datetime) -> None:
        """Begin without a process. `places`: of every job; a process keeps only its own job's once it has one."""
        self._runtime = runtime
        self._log = log
        self._places = places
        self._worker: Worker | None = None
        self._pipe = -1
        """The end of the worker's pipe to write to, while there is a worker."""
        self._not_before = now + SETTLE

    def tend(self, now: datetime) -> None:
        """Start a process when none waits and it is time. Call it on the main thread (see `runtime/launch.py`)."""
        if self._worker is not None and self._worker.exit_code() is not None:
            logger.warning("the waiting training process ended with %s", self._worker.exit_code())
            self._forget()
            self._not_before = now + AFTER_A_DEATH
        if self._worker is not None or now < self._not_before:
            return

        self._not_before = now + AFTER_A_DEATH  # in case the start fails
        reader, writer = os.pipe()
        spec = trainer_spec(("--wait", str(reader)), self._log, reader, self._places)
        try:
            self._worker = self._runtime.start(spec)
        except OSError:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._pipe = writer

    def take(self, order: Order, now: datetime) -> Worker | None:
        """Hand the job to the waiting process; None when there is none, or it has just died."""
        worker, self._not_before = self._worker, now + SETTLE
        if worker is None or worker.exit_code() is not None:
            return None
        try:
            os.write(self._pipe, order.to_line().encode())
        except BrokenPipeError:
            return None  # the next `tend` finds that it has ended
        self._forget()
        return worker

    def stop(self) -> None:
        """End the process if there is one."""
        if self._worker is not None:
            self._worker.kill()
            self._forget()

    def _forget(self) -> None:
        self._worker = None
        with suppress(OSError):
            os.close(self._pipe)
