"""Trainings as processes of this machine, which write into the work folders of their jobs (`work_folders.py`).

The process itself is `tuneship/training/`; it writes its progress to a file, and finds its orders there and on a pipe.
"""

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.isolation.landlock import Places
from tuneship.processes.worker_protocol import Runtime, Worker, WorkerSpec
from tuneship.service.jobs.launcher import Training, TrainingOrder, TrainingProgress
from tuneship.service.jobs.work_folders import FolderTraining, PreparedAttempt, WorkFolders
from tuneship.store.files.blobs import Blobs
from tuneship.training.spec import CANCEL_FILE, LOG_FILE, Order, TrainingSpec

# Pause after the service's start, so that loading libraries does not slow it down.
SETTLE = timedelta(seconds=2)
MODULE = "tuneship.training"


def trainer_spec(folder: Path, spec: TrainingSpec, pipe: int) -> WorkerSpec:
    """A training process that reads its order from the file descriptor `pipe`, and reaches the files of its job alone.

    `folder`: of the attempt.
    """
    arguments = (str(folder), str(pipe))
    places = Places(spec.read_paths, (folder, *spec.written_paths), uses_gpus=True)
    return WorkerSpec(MODULE, arguments, folder / LOG_FILE, inherited=(pipe,), places=places)


class LocalTraining(FolderTraining):
    """A training process that this service has started."""

    def __init__(
        self, attempt: PreparedAttempt, threads: Threads, blobs: Blobs, worker: Worker
    ) -> None:
        """See `FolderTraining`."""
        super().__init__(attempt, threads, blobs)
        self._worker = worker
        self._is_killed = False

    @property
    def is_running(self) -> bool:
        """Whether the process is still to be ended: a second kill would not help where the kernel holds a process."""
        return not self._is_killed and self._worker.exit_code() is None

    def exit_code(self) -> int | None:
        """The exit code of the process."""
        return self._worker.exit_code()

    async def cancel(self) -> None:
        """Make the file that the process looks for after each step."""
        await self.threads.run((self.folder / CANCEL_FILE).touch)

    async def end(self) -> None:
        """Kill the process group and wait until the process has ended."""
        if self.attempt.checkpoints is not None:
            self.attempt.checkpoints.stop()
        await self.threads.run(self.kill)

    def kill(self) -> None:
        """Kill the process group, from any thread."""
        self._worker.kill()
        self._is_killed = True
        self.attempt.held.close()


class LocalTrainingLauncher:
    """Starts training processes. Obeys `TrainingLauncher`."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        folders: WorkFolders,
        clock: Callable[[], datetime],
        preloads: bool,
    ) -> None:
        """`preloads`: load the training libraries shortly after the start, before the first job."""
        self._runtime = runtime
        self._folders = folders
        self._running: list[LocalTraining] = []
        self._preload_at = clock() + SETTLE if preloads else None

    async def start(self, order: TrainingOrder) -> Training:
        """Write the attempt's spec and hand it to a process. Call it on the main thread (see `processes/launch.py`).

        Raises `OSError` when no process can be started.
        """
        attempt = await self._folders.prepared(order)
        # Nothing may be awaited from here on: a process that nobody knows of could not be ended.
        try:
            worker = self._spawn(attempt, order)
        except BaseException:
            attempt.held.close()
            raise
        training = LocalTraining(attempt, self._folders.threads, self._folders.blobs, worker)
        self._running = [*(one for one in self._running if one.is_running), training]
        return training

    def _spawn(self, attempt: PreparedAttempt, order: TrainingOrder) -> Worker:
        line = Order(attempt.folder, order.keys).to_line()
        reader, writer = os.pipe()
        try:
            os.write(writer, line.encode())  # the pipe holds it until there is a reader
            return self._runtime.start(trainer_spec(attempt.folder, attempt.spec, reader))
        finally:
            os.close(writer)
            os.close(reader)

    def earlier(self, job_id: str, attempt: int) -> TrainingProgress:
        """The progress file of an attempt, which may be missing."""
        return self._folders.earlier(job_id, attempt)

    def preload(self, now: datetime) -> None:
        """Have the libraries of trainings loaded before the first job."""
        if self._preload_at is not None and now >= self._preload_at:
            self._preload_at = None
            self._runtime.preload(MODULE)

    async def clear(self, job_id: str) -> None:
        """Remove the folder of a job that has ended."""
        await self._folders.clear(job_id)

    async def stop(self) -> None:
        """End all processes."""
        for training in self._running:
            if training.is_running:
                training.kill()
