"""One training process that waits with its libraries loaded, so that the next job begins seconds earlier.

It knows nothing of a job until it is handed one, does that one and ends: each job still has a process of its own.
It dies with the service like every worker, and by itself when the service's end of its line is gone.
Next: `runner.py` (who hands out jobs), `tuneship/training/__main__.py` (the process).
"""

import logging
import os
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from tuneship.runtime.landlock import Places
from tuneship.runtime.worker_protocol import Runtime, Worker, WorkerSpec
from tuneship.training.spec import LOG_FILE, Order

logger = logging.getLogger(__name__)

# After the service's start and that of each job: its libraries are loaded when those have loaded
# theirs.
SETTLE = timedelta(seconds=2)
# One that dies while it waits is not replaced at once: there may be no memory for it.
AFTER_A_DEATH = timedelta(minutes=1)


def start_on(runtime: Runtime, order: Order, places: Places) -> Worker:
    """A process for one job. The pipe holds the line before there is a reader. Raises `OSError`."""
    theirs, ours = os.pipe()
    try:
        os.write(ours, order.to_line().encode())
        arguments = (str(order.folder), str(theirs))
        log = order.folder / LOG_FILE
        return runtime.start(_trainer(arguments, log, theirs, places))
    finally:
        os.close(ours)
        os.close(theirs)


def _trainer(arguments: tuple[str, ...], log: Path, line: int, places: Places) -> WorkerSpec:
    return WorkerSpec("tuneship.training", arguments, log, inherited=(line,), places=places)


class WarmTrainer:
    """None or one waiting process."""

    def __init__(self, runtime: Runtime, log: Path, places: Places, now: datetime) -> None:
        """Nothing is started yet. `places`: of every job; a process gives up those of others when it has its own."""
        self._runtime = runtime
        self._log = log
        self._places = places
        self._worker: Worker | None = None
        self._line = -1
        """Our end of its pipe, while there is a worker."""
        self._not_before = now + SETTLE

    def tend(self, now: datetime) -> None:
        """Start one when none waits and it is time. Call it on the main thread (see `runtime/launch.py`)."""
        if self._worker is not None and self._worker.exit_code() is not None:
            logger.warning("the waiting training process ended with %s", self._worker.exit_code())
            self._forget()
            self._not_before = now + AFTER_A_DEATH
        if self._worker is None and now >= self._not_before:
            self._not_before = now + AFTER_A_DEATH  # should that fail
            self._start()

    def take(self, order: Order, now: datetime) -> Worker | None:
        """Hand the job to the one that waits; None when there is none, or it has just died."""
        worker, self._not_before = self._worker, now + SETTLE
        if worker is None or worker.exit_code() is not None:
            return None
        try:
            os.write(self._line, order.to_line().encode())
        except BrokenPipeError:
            return None  # the next look at it finds that it has ended
        self._forget()
        return worker

    def stop(self) -> None:
        """End it."""
        if self._worker is not None:
            self._worker.kill()
            self._forget()

    def _start(self) -> None:
        theirs, ours = os.pipe()
        waiting = ("--wait", str(theirs))
        spec = _trainer(waiting, self._log, theirs, self._places)
        try:
            self._worker = self._runtime.start(spec)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._line = ours

    def _forget(self) -> None:
        self._worker = None
        with suppress(OSError):
            os.close(self._line)
