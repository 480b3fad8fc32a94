"""The work folder of a job on this machine: in it one for each attempt, and one for the checkpoints.

A training process of this machine writes there; what one on a node writes is copied there (`agent_launcher.py`). So
whatever is known of a training is read from these files, and goes on to the store of files from here.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tuneship.agents.base_digest import BaseDigests
from tuneship.host.gpus import GpuLease, GpuLeases
from tuneship.host.thread_pools import Threads
from tuneship.service.jobs.attempts import remaining_seconds
from tuneship.service.jobs.launcher import (
    StoredCheckpoint,
    TrainingNews,
    TrainingOrder,
    TrainingProgress,
)
from tuneship.service.jobs.stored_checkpoints import FOLDER, StoredCheckpoints
from tuneship.store.files.blobs import CHECKPOINTS, Blobs, BlobsAway
from tuneship.store.files.stored_files import dataset_file, model_ref
from tuneship.training.checkpoint_folders import latest_step
from tuneship.training.spec import PROGRESS_FILE, SPEC_FILE, ResolvedHyperparameters, TrainingSpec

# Folder of an attempt in which its process puts the adapter.
OUTPUT, ADAPTER = "output", "adapter"


class FolderProgress:
    """Reads the progress file of an attempt, whether or not its process is still known."""

    def __init__(self, folder: Path, threads: Threads) -> None:
        """`folder` is the attempt's."""
        self.folder = folder
        self.threads = threads

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        """Read complete lines from the offset on. Raises `ValueError` where the first one cannot be read."""
        return await self.threads.run(self._read, offset, most_lines, None)

    def _read(self, offset: int, most_lines: int, exit_code: int | None) -> TrainingNews:
        file = self.folder / PROGRESS_FILE
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


@dataclass(frozen=True)
class PreparedAttempt:
    """The work folder of an attempt that may start."""

    folder: Path
    spec: TrainingSpec
    # Keeps the local copies of the files that the spec names, and its GPUs.
    held: ExitStack
    # Those in the store; None where no other machine can go on from them.
    checkpoints: StoredCheckpoints | None


class FolderTraining(FolderProgress, ABC):
    """A training with its files in a work folder. Subclasses know where it runs."""

    def __init__(self, attempt: PreparedAttempt, threads: Threads, blobs: Blobs) -> None:
        """Adapters are stored in `blobs`."""
        super().__init__(attempt.folder, threads)
        self.attempt = attempt
        self._blobs = blobs

    @abstractmethod
    def exit_code(self) -> int | None:
        """How the process ended, once all that it wrote is in the folder; None while it runs."""

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        """Read complete lines from the offset on. Raises `ValueError` where the first one cannot be read."""
        exit_code = self.exit_code()  # before reading: nothing is written after it
        news = await self.threads.run(self._read, offset, most_lines, exit_code)
        checkpoints = self.attempt.checkpoints
        if checkpoints is None:
            return news
        checkpoints.look()
        return replace(news, checkpoint=checkpoints.newest)

    def keep_only(self, checkpoint: StoredCheckpoint) -> None:
        """Have earlier checkpoints deleted from the store."""
        if self.attempt.checkpoints is not None:
            self.attempt.checkpoints.keep_only(checkpoint)

    async def kept_step(self) -> int:
        """The step of the job's latest checkpoint; 0 if there is none."""
        return await self.threads.run(latest_step, self.folder.parent / FOLDER)

    async def store_result(self, key: str) -> Mapping[str, str]:
        """Store the adapter's files under the key; return their SHA-256 by name."""
        return await self.threads.run(self._store_adapter, key)

    def _store_adapter(self, key: str) -> Mapping[str, str]:
        adapter = self.folder / OUTPUT / ADAPTER
        return {
            file.name: self._blobs.put(file, f"{key}/{file.name}")
            for file in sorted(adapter.iterdir())
        }


class WorkFolders:
    """The work folders of all jobs."""

    def __init__(  # noqa: PLR0913 - all that it uses, by name
        self,
        *,
        blobs: Blobs,
        clock: Callable[[], datetime],
        gpus: GpuLeases | None,
        devices: int,
        work: Path,
        threads: Threads,
        uploads: Threads,
        is_portable: bool,
    ) -> None:
        """`threads`: for all work that waits for a disk; `uploads`: for uploads of checkpoints to a bucket.

        `gpus`: those of this machine; None where a cluster says itself which ones an agent gets. `devices`: of a
        training, at most. `is_portable`: whether another machine may go on with a training, so that its base model is
        known by its files and not by its path.
        """
        self.threads = threads
        self.blobs, self._clock = blobs, clock
        self._gpus, self._devices = gpus, devices
        self._work = work
        self._upload_threads = uploads
        self._is_portable = is_portable
        self._digests = BaseDigests()

    async def prepared(self, order: TrainingOrder) -> PreparedAttempt:
        """Bring the files of an attempt and of its latest checkpoint here, and write its spec."""
        folder = attempt_folder(self._work, order.job["id"], order.job["attempt"])
        blobs, checkpoints = self.blobs, None
        if blobs.is_remote:
            uploads, clock = self._upload_threads, self._clock
            checkpoints = StoredCheckpoints(order.job, folder, blobs, uploads, clock)
            await self.threads.run(checkpoints.fetch)
        spec, held = await self.threads.run(self._write_spec, folder, order)
        return PreparedAttempt(folder, spec, held, checkpoints)

    def _write_spec(self, folder: Path, order: TrainingOrder) -> tuple[TrainingSpec, ExitStack]:
        """Write the training's spec: paths and numbers, no address and no secret. Return the locks on its files and
        GPUs.
        """
        job, blobs = order.job, self.blobs
        comparison: dict[str, Any] = job["comparison"] or {}
        hyperparameters = {**job["hyperparameters"]}
        hyperparameters["target_modules"] = tuple(hyperparameters["target_modules"])
        with ExitStack() as held:
            lease = GpuLease()
            if self._gpus is not None:
                # Like its processes: no more than a batch has examples.
                most = min(self._devices, hyperparameters["batch_size"])
                lease = held.enter_context(self._gpus.lease(most))
            training = held.enter_context(dataset_file(blobs, order.training))
            validation = None
            if order.validation is not None:
                validation = held.enter_context(dataset_file(blobs, order.validation))
            compared = None
            if order.compared is not None:
                compared = held.enter_context(blobs.fetched(model_ref(order.compared)))
            spec = TrainingSpec(
                base_model=str(order.base),
                training_file=training,
                validation_file=validation,
                dataset_format=order.training["format"],
                output_dir=folder / OUTPUT,
                checkpoint_dir=folder.parent / FOLDER,
                validation_frequency=job["validation_frequency"],
                max_runtime_seconds=remaining_seconds(job),
                threads=0,
                hyperparameters=ResolvedHyperparameters(**hyperparameters),
                devices=self._devices,
                gpus=lease.gpus,
                shares_gpus=lease.is_shared,
                base_digest=self._digests.of(order.base) if self._is_portable else None,
                today=job["created_at"],
                comparison_seed=comparison.get("seed"),
                compared_adapter=compared,
                compared_model=order.compared["id"] if order.compared else None,
            )
            for directory in (folder, spec.output_dir, spec.checkpoint_dir):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / SPEC_FILE).write_text(spec.to_json())
            return spec, held.pop_all()

    def earlier(self, job_id: str, attempt: int) -> TrainingProgress:
        """The progress file of an attempt, which may be missing."""
        return FolderProgress(attempt_folder(self._work, job_id, attempt), self.threads)

    async def clear(self, job_id: str) -> None:
        """Remove the folder of a job that has ended, and its stored checkpoints if the store answers."""
        await self.threads.run(clear_work, self._work, job_id)
        blobs = self.blobs
        if blobs.is_remote:
            with suppress(BlobsAway):  # they are removed with files that no row names
                await self.threads.run(blobs.delete, f"{CHECKPOINTS}/{job_id}")


def attempt_folder(work: Path, job_id: str, attempt: int) -> Path:
    """The folder of one attempt."""
    return work / job_id / f"attempt-{attempt}"


def clear_work(work: Path, job_id: str) -> None:
    """Remove the attempts and checkpoints of a job that has ended."""
    shutil.rmtree(work / job_id, ignore_errors=True)
