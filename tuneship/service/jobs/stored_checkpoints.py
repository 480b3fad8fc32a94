"""Checkpoints in the store of files, so that a job goes on from them on another machine. Its row names the newest.

A training process keeps its checkpoints in the job's work folder. With files in a bucket, each new one is also
uploaded, beside the training and as it is there: sealed, with the key of the job. The next attempt gets it from there
unless its own machine has a later one. Next: `work_folders.py`.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tuneship.host.thread_pools import Threads
from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.background.background_retries import BackgroundRetries
from tuneship.service.jobs.launcher import StoredCheckpoint
from tuneship.store.database.rows import Row
from tuneship.store.files.blobs import CHECKPOINTS, Blobs, check_digest
from tuneship.training.checkpoint_folders import (
    arriving_folder,
    give_second_names,
    latest_step,
    put_in_place,
)

logger = logging.getLogger(__name__)

# Folder of a job's checkpoints in its work folder, beside those of its attempts.
FOLDER = "checkpoints"
# Folder of an attempt with the checkpoint that is being uploaded.
SENT = "sent"


class StoredCheckpoints:
    """Reads and adds the stored checkpoints of a job, for one attempt."""

    def __init__(
        self,
        job: Row,
        attempt: Path,
        blobs: Blobs,
        threads: Threads,
        clock: Callable[[], datetime],
    ) -> None:
        """`attempt`: the attempt's folder in the job's work folder; `threads`: for uploads only."""
        self._job_id, self._number = job["id"], job["attempt"]
        self._attempt, self._blobs, self._threads = attempt, blobs, threads
        self._retries = BackgroundRetries(clock)
        # The newest checkpoint of this attempt that is stored as a whole.
        self.newest: StoredCheckpoint | None = None
        named: Mapping[str, Any] | None = job["checkpoint"]
        # All that may be in the store.
        self._stored = [] if named is None else [StoredCheckpoint(**named)]
        # Checkpoints of earlier steps are not needed any more.
        self._needed_from = 0
        self._upload: asyncio.Task[None] | None = None

    def fetch(self) -> None:
        """Download the checkpoint that the row names into the work folder, unless a later one is there.

        One that is missing or damaged is left out: losing some steps is better than failing the job. Raises `OSError`
        and `BlobsAway`.
        """
        folder = self._attempt.parent / FOLDER
        for checkpoint in self._stored[:]:
            if checkpoint.step <= latest_step(folder):
                continue
            arriving = arriving_folder(folder, checkpoint.step)
            try:
                self._download(checkpoint, arriving)
            except (FileNotFoundError, ObjectDamaged) as error:
                kind = type(error).__name__
                logger.warning("a stored checkpoint is unusable: %s (%s)", self._job_id, kind)
                self._stored.remove(checkpoint)
                shutil.rmtree(arriving, ignore_errors=True)
            else:
                put_in_place(arriving, folder, checkpoint.step)

    def _download(self, checkpoint: StoredCheckpoint, folder: Path) -> None:
        for name, sha256 in checkpoint.objects.items():
            if not self._blobs.copy_out(f"{self._prefix(checkpoint)}/{name}", folder / name):
                raise FileNotFoundError(name)
            check_digest(folder / name, sha256)

    def keep_only(self, checkpoint: StoredCheckpoint) -> None:
        """Note that the row names this checkpoint, so that earlier ones are no longer needed."""
        self._needed_from = checkpoint.step

    def look(self) -> None:
        """Upload the newest checkpoint in the background, if it is not stored yet; call it often."""
        is_due = self._upload is None or self._upload.done()
        if is_due and not self._retries.is_waiting(self._job_id):
            self._upload = asyncio.create_task(self._store())

    async def _store(self) -> None:
        try:
            await self._threads.run(self._store_newest)
            self._retries.end(self._job_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without
            logger.warning("a checkpoint could not be stored: %s", type(error).__name__)
            self._retries.add(self._job_id, error)

    def stop(self) -> None:
        """Ignore a running upload from now on; its thread may still finish it."""
        if self._upload is not None:
            self._upload.cancel()

    def _store_newest(self) -> None:
        """Upload the newest checkpoint, then delete those that no row needs. Raises `OSError` and `BlobsAway`."""
        folder = self._attempt.parent / FOLDER
        step = latest_step(folder)
        if step > max((one.step for one in self._stored), default=0):
            sent = self._attempt / SENT
            if not give_second_names(folder, step, sent):  # there is a newer one
                return
            stored = StoredCheckpoint(self._number, step, {})
            try:
                objects = {
                    file.name: self._blobs.put(file, f"{self._prefix(stored)}/{file.name}")
                    for file in sorted(sent.iterdir())
                }
            finally:
                if not folder.exists():
                    # The job has ended meanwhile. Its stored checkpoints may have been deleted before this one came.
                    self._blobs.delete(self._prefix(stored))
            shutil.rmtree(sent, ignore_errors=True)
            self.newest = replace(stored, objects=objects)
            self._stored.append(self.newest)
        for old in [one for one in self._stored if one.step < self._needed_from]:
            self._blobs.delete(self._prefix(old))
            self._stored.remove(old)

    def _prefix(self, checkpoint: StoredCheckpoint) -> str:
        """The key under which the files of a checkpoint are stored; nothing else is ever stored there."""
        return f"{CHECKPOINTS}/{self._job_id}/{checkpoint.attempt}-{checkpoint.step}"
