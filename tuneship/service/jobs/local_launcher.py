"""Trainings as processes of this machine: a work folder for each job, in it one for each attempt and its checkpoints.

The process itself is `tuneship/training/`; it writes its progress to a file, and finds its orders there and on a pipe.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from tuneship.host.thread_pools import Threads
from tuneship.runtime.worker_protocol import Runtime, Worker
from tuneship.service.access.isolation import training_places
from tuneship.service.context.context import Parts
from tuneship.service.jobs.attempts import remaining_seconds
from tuneship.service.jobs.launcher import Training, TrainingNews, TrainingOrder, TrainingProgress
from tuneship.service.jobs.warm_trainer import WarmTrainer, trainer_spec
from tuneship.store.blobs import Blobs
from tuneship.store.stored_files import dataset_file
from tuneship.training.spec import (
    CANCEL_FILE,
    LOG_FILE,
    PROGRESS_FILE,
    SPEC_FILE,
    Order,
    ResolvedHyperparameters,
    TrainingSpec,
)

# Folder of a job's checkpoints, beside those of its attempts.
CHECKPOINTS = "checkpoints"
# Folder of an attempt in which its process puts the adapter.
OUTPUT = "output"


class LocalProgress:
    """Reads the progress file of an attempt, whether or not its process is still known."""

    def __init__(self, folder: Path, threads: Threads) -> None:
        """`folder` is the attempt's."""
        self._folder = folder
        self._threads = threads

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        """Read complete lines from the offset on. Raises `ValueError` where the first one cannot be read."""
        return await self._threads.run(self._read, offset, most_lines, None)

    def _read(self, offset: int, most_lines: int, exit_code: int | None) -> TrainingNews:
        file = self._folder / PROGRESS_FILE
        lines: list[dict[str, Any]] = []
        if file.is_file():
            with file.open("rb") as opened:
                opened.seek(offset)
                while len(lines) < most_lines and (line := opened.readline()).endswith(b"\n"):
                    try:
                        lines.append(json.loads(line))
                    except ValueError:
                        if lines:  # these are stored first; the next call begins with the bad line
                            break
                        raise
                    offset += len(line)
        return TrainingNews(lines, offset, exit_code)


class LocalTraining(LocalProgress):
    """A training process that this service has started."""

    def __init__(
        self, folder: Path, threads: Threads, worker: Worker, blobs: Blobs, held: ExitStack
    ) -> None:
        """`folder` is the attempt's; adapters are stored in `blobs`; `held` keeps the files that it reads."""
        super().__init__(folder, threads)
        self._worker = worker
        self._blobs = blobs
        self._held = held
        self._is_killed = False

    @property
    def is_running(self) -> bool:
        """Whether the process is still to be ended: a second kill would not help where the kernel holds a process."""
        return not self._is_killed and self._worker.exit_code() is None

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        """Read complete lines from the offset on. Raises `ValueError` where the first one cannot be read."""
        exit_code = self._worker.exit_code()  # before reading: nothing is written after it
        return await self._threads.run(self._read, offset, most_lines, exit_code)

    async def cancel(self) -> None:
        """Make the file that the process looks for after each step."""
        await self._threads.run((self._folder / CANCEL_FILE).touch)

    async def kept_step(self) -> int:
        """The step of the job's latest checkpoint; 0 without one."""
        return await self._threads.run(self._latest_checkpoint)

    def _latest_checkpoint(self) -> int:
        found = (self._folder.parent / CHECKPOINTS).glob("step-*")
        return max((int(path.name.rpartition("-")[2]) for path in found), default=0)

    async def store_result(self, key: str) -> Mapping[str, str]:
        """Store the adapter's files under the key; return their SHA-256 by name."""
        return await self._threads.run(self._store_adapter, key)

    def _store_adapter(self, key: str) -> Mapping[str, str]:
        adapter = self._folder / OUTPUT / "adapter"
        return {
            file.name: self._blobs.put(file, f"{key}/{file.name}")
            for file in sorted(adapter.iterdir())
        }

    async def end(self) -> None:
        """Kill the process group; returns when the process is gone."""
        await self._threads.run(self.kill)

    def kill(self) -> None:
        """Kill the process group, from any thread."""
        self._worker.kill()
        self._is_killed = True
        self._held.close()


class LocalTrainingLauncher:
    """Starts training processes. Obeys `TrainingLauncher`."""

    def __init__(self, parts: Parts, runtime: Runtime, work: Path, threads: Threads) -> None:
        """`work`: folder for attempts and checkpoints; `threads`: for everything that waits for a disk."""
        self._parts = parts
        self._runtime = runtime
        self._work = work
        self._threads = threads
        self._running: list[LocalTraining] = []
        log = parts.settings.data_dir / "logs" / "trainer.log"
        self._places = training_places(parts.settings, work, parts.catalogue)
        self._warm = WarmTrainer(runtime, log, self._places, parts.clock())

    async def start(self, order: TrainingOrder) -> Training:
        """Write the attempt's spec and hand it to a process. Call it on the main thread (see `runtime/launch.py`).

        Raises `OSError` when no process can be started.
        """
        folder = attempt_folder(self._work, order.job["id"], order.job["attempt"])
        held = await self._threads.run(self._write_spec, folder, order)
        # Nothing may be awaited from here on: a process that nobody knows of could not be ended.
        with held:
            worker = self._spawn(Order(folder, order.keys))
            held = held.pop_all()  # from now on they are the training's
        training = LocalTraining(folder, self._threads, worker, self._parts.blobs, held)
        self._running = [*(one for one in self._running if one.is_running), training]
        return training

    def _spawn(self, order: Order) -> Worker:
        """Take the process that waits with its libraries loaded, or start one."""
        waiting = self._warm.take(order, self._parts.clock())
        if waiting is not None:
            return waiting
        reader, writer = os.pipe()
        try:
            os.write(writer, order.to_line().encode())  # the pipe holds it until there is a reader
            arguments = (str(order.folder), str(reader))
            log = order.folder / LOG_FILE
            return self._runtime.start(trainer_spec(arguments, log, reader, self._places))
        finally:
            os.close(writer)
            os.close(reader)

    def _write_spec(self, folder: Path, order: TrainingOrder) -> ExitStack:
        """Write paths and numbers: no address and no secret. Returns the holds on the files that it names."""
        job, blobs = order.job, self._parts.blobs
        hyperparameters = {**job["hyperparameters"]}
        hyperparameters["target_modules"] = tuple(hyperparameters["target_modules"])
        with ExitStack() as held:
            training = held.enter_context(dataset_file(blobs, order.training))
            validation = None
            if order.validation is not None:
                validation = held.enter_context(dataset_file(blobs, order.validation))
            spec = TrainingSpec(
                base_model=str(order.base),
                training_file=training,
                validation_file=validation,
                dataset_format=order.training["format"],
                output_dir=folder / OUTPUT,
                checkpoint_dir=folder.parent / CHECKPOINTS,
                validation_frequency=job["validation_frequency"],
                max_runtime_seconds=remaining_seconds(job),
                threads=0,
                hyperparameters=ResolvedHyperparameters(**hyperparameters),
                devices=self._parts.settings.training_devices,
            )
            for directory in (folder, spec.output_dir, spec.checkpoint_dir):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / SPEC_FILE).write_text(spec.to_json())
            return held.pop_all()

    def earlier(self, job_id: str, attempt: int) -> TrainingProgress:
        """The progress file of an attempt, which may be missing."""
        return LocalProgress(attempt_folder(self._work, job_id, attempt), self._threads)

    def keep_warm(self, now: datetime) -> None:
        """Have a process wait for the next job with its libraries loaded."""
        if self._parts.settings.warm_trainer:
            self._warm.tend(now)

    async def clear(self, job_id: str) -> None:
        """Remove the folder of a job that has ended."""
        await self._threads.run(clear_work, self._work, job_id)

    def stop(self) -> None:
        """End all processes, the waiting one too."""
        self._warm.stop()
        for training in self._running:
            if training.is_running:
                training.kill()


def attempt_folder(work: Path, job_id: str, attempt: int) -> Path:
    """The folder in which one attempt writes."""
    return work / job_id / f"attempt-{attempt}"


def clear_work(work: Path, job_id: str) -> None:
    """Remove the attempts and checkpoints of a job that has ended."""
    shutil.rmtree(work / job_id, ignore_errors=True)
