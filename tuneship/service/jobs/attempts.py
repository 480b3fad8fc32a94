"""One training process from the service's side: its folder, its progress lines, its end. Knows no HTTP.

The process itself is `tuneship/training/`; when it starts and what its end means is `supervisor.py`.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tuneship.runtime.worker_protocol import Worker
from tuneship.store.blobs import Blobs
from tuneship.store.job_leases import JobLease
from tuneship.store.row_types import DatasetRow, JobRow
from tuneship.training.spec import (
    CANCEL_FILE,
    PROGRESS_FILE,
    SPEC_FILE,
    ResolvedHyperparameters,
    TrainingSpec,
)

# What has a key of its own from the job's creation on: its checkpoints, and the adapter that it
# will make.
KEPT_OF_A_JOB = ("jobs", "models")
# Folder of a job, beside those of its attempts.
CHECKPOINTS = "checkpoints"
ENDS = ("completed", "failed", "cancelled")


@dataclass
class Attempt:
    """What one attempt at a job has told, as far as it is stored."""

    claim: JobLease
    """The right to store it."""
    folder: Path
    number: int
    offset: int = 0
    """Bytes of progress that were stored."""
    first_step: int | None = None
    """Where this attempt began; None before it said so."""
    last_step: int = 0
    furthest_step: int = 0
    """That any earlier attempt has reached."""
    end: dict[str, Any] | None = None

    def new_lines(self, most: int) -> tuple[list[dict[str, Any]], int]:
        """Whole lines behind `offset`, and the offset to set once they are stored. ValueError: no line."""
        file = self.folder / PROGRESS_FILE
        lines: list[dict[str, Any]] = []
        offset = self.offset
        if file.is_file():
            with file.open("rb") as opened:
                opened.seek(offset)
                while len(lines) < most and (line := opened.readline()).endswith(b"\n"):
                    try:
                        lines.append(json.loads(line))
                    except ValueError:
                        if lines:  # those first; the next call begins with this one
                            break
                        raise
                    offset += len(line)
        return lines, offset

    def has_advanced(self) -> bool:
        """Whether this attempt got further than those before it, or has kept something that they had not."""
        if self.first_step is None:
            return False
        return self.last_step > self.furthest_step or self._kept_step() > self.first_step

    def _kept_step(self) -> int:
        kept = (self.folder.parent / CHECKPOINTS).glob("step-*")
        return max((int(path.name.rpartition("-")[2]) for path in kept), default=0)


@dataclass(kw_only=True)
class RunningAttempt(Attempt):
    """An attempt that this service has started, and its process."""

    job: JobRow
    worker: Worker
    latest_end: datetime
    """Then it is ended, whatever it does."""
    cancelled_at: datetime | None = None

    def has_model(self) -> bool:
        """Whether its adapter is complete on disk, which is so before it says `completed`, and nobody has cancelled.

        A cancelled one is awaited: its job is `cancelled` only when its processes are gone.
        """
        completed = self.end is not None and self.end["kind"] == "completed"
        return completed and self.cancelled_at is None

    def ask_to_cancel(self, now: datetime) -> None:
        """Say so in a file that the process looks at after each step."""
        if self.cancelled_at is None:
            self.cancelled_at = now
            (self.folder / CANCEL_FILE).touch()

    def is_overdue(self, now: datetime, patience: timedelta) -> bool:
        """Whether it was asked to stop and has not."""
        return self.cancelled_at is not None and now - self.cancelled_at > patience


def attempt_folder(work: Path, job_id: str, attempt: int) -> Path:
    """Where one attempt writes."""
    return work / job_id / f"attempt-{attempt}"


def told_attempts(work: Path, job: JobRow) -> Iterator[Attempt]:
    """Those of a job that may have told what their service did not live to store."""
    claim, stored = JobLease(job["id"], job["attempt"]), job["progress_attempt"]
    for number in range(max(1, stored), job["attempt"] + 1):
        folder = attempt_folder(work, job["id"], number)
        offset = job["progress_offset"] if number == stored else 0
        yield Attempt(claim, folder, number, offset)


def clear(work: Path, job_id: str) -> None:
    """Remove everything of an ended job: attempts and checkpoints."""
    shutil.rmtree(work / job_id, ignore_errors=True)


def remaining_seconds(job: JobRow) -> float:
    """What earlier attempts have left of the job's time; `updated_at` of a fresh claim is now."""
    spent_s = (job["updated_at"] - (job["started_at"] or job["updated_at"])).total_seconds()
    return max(0.0, job["compute_config"]["max_runtime_hours"] * 3600.0 - spent_s)


def write_spec(
    folder: Path,
    blobs: Blobs,
    job: JobRow,
    files: tuple[DatasetRow, DatasetRow | None],
    base: Path,
    devices: int,
) -> None:
    """The attempt's orders: paths and numbers; no address, no secret."""
    training, validation = files
    hyperparameters = {**job["hyperparameters"]}
    hyperparameters["target_modules"] = tuple(hyperparameters["target_modules"])
    spec = TrainingSpec(
        base_model=str(base),
        training_file=blobs.local(training["blob"]),
        validation_file=None if validation is None else blobs.local(validation["blob"]),
        dataset_format=training["format"],
        output_dir=folder / "output",
        checkpoint_dir=folder.parent / CHECKPOINTS,
        validation_frequency=job["validation_frequency"],
        max_runtime_seconds=remaining_seconds(job),
        threads=0,
        hyperparameters=ResolvedHyperparameters(**hyperparameters),
        devices=devices,
    )
    for one in (folder, spec.output_dir, spec.checkpoint_dir):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / SPEC_FILE).write_text(spec.to_json())
