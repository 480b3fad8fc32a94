"""Brings reality in line with the rows: trains queued jobs, loads and unloads deployments, reverts lapsed leases.

One loop on the service's event loop; database work goes to threads, processes are started on the main thread (their
parent-death signal follows it). Everything it knows can be lost: after a restart the rows and checkpoints suffice.
"""

import asyncio
import logging
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.runtime.workers import Runtime, WorkerSpec
from tuneship.service import training_runs
from tuneship.service.context import Parts
from tuneship.service.deployment_keeper import DeploymentKeeper
from tuneship.service.models import model_id
from tuneship.service.training_runs import ENDS, TrainingRun
from tuneship.store import endpoint_records, job_records, leases, metric_windows, rows, tables
from tuneship.store.blobs import sha256_of
from tuneship.store.events import emit
from tuneship.store.leases import Claim, LeaseLost
from tuneship.store.rows import Row

logger = logging.getLogger(__name__)

TICK_S = 0.2
BEAT_EVERY = timedelta(seconds=10)
CANCEL_PATIENCE = timedelta(seconds=3.5)
"""Then the process is killed, so that a cancelled job's processes are gone within 5 s."""
FRUITLESS_ATTEMPTS = 3
METRICS_KEPT = timedelta(days=90)
FORGET_EVERY = timedelta(hours=1)
LINES_AT_ONCE = 500
"""Progress lines in one transaction."""
STEP_FIELDS = (
    "step",
    "training_loss",
    "validation_loss",
    "learning_rate",
    "epoch",
    "accuracy",
    "perplexity",
)


class Supervisor:
    """The service's one background loop."""

    def __init__(self, parts: Parts, runtime: Runtime, work: Path, owner: str) -> None:
        """`work`: folder for attempts and checkpoints; `owner`: this process in lease rows."""
        self._parts = parts
        self._runtime = runtime
        self._work = work
        self._owner = owner
        self._runs: list[TrainingRun] = []
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper = DeploymentKeeper(parts)
        self._forget_at = parts.clock()

    def wake(self) -> None:
        """Look at the rows now; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def run(self) -> None:
        """Until cancelled; then training processes are ended, to go on from their checkpoint later."""
        self._loop = asyncio.get_running_loop()
        warming = asyncio.create_task(self._keeper.warm())
        try:
            while True:
                await self._tick()
                self._woken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), TICK_S)
        finally:
            warming.cancel()
            for run in self._runs:
                run.worker.kill()
            await asyncio.to_thread(self._parts.store_metrics)

    async def _tick(self) -> None:
        try:
            await asyncio.to_thread(self._housekeeping)
            await self._keeper.reconcile()
            await self._start_jobs()
            for run in list(self._runs):
                await self._follow_alone(run)
        except Exception:  # the loop must outlive any single failure; the next tick tries again
            logger.exception("supervision failed")
            await asyncio.sleep(1)

    def _housekeeping(self) -> None:
        now = self._parts.clock()
        self._parts.store_metrics()
        self._forget_old(now)
        with self._parts.database.read() as connection:
            query = sa.select(sa.func.count()).where(tables.endpoints.c.lease_until <= now)
            lapsed = connection.execute(query).scalar_one()
            cancelling = _abandoned(connection, {run.claim.job_id for run in self._runs})
        if lapsed or cancelling:
            with self._parts.database.write() as connection:
                for endpoint_id in endpoint_records.revert_lapsed(connection, now):
                    logger.warning("lease lapsed, split reverted: %s", endpoint_id)
                for job in cancelling:
                    self._cancelled(connection, Claim(job["id"], job["attempt"]), job)
                    training_runs.clear(self._work, job["id"])

    def _forget_old(self, now: datetime) -> None:
        """Metrics grow by a row a second and endpoint: they are kept for `METRICS_KEPT`."""
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_EVERY
        with self._parts.database.write() as connection:
            metric_windows.forget(connection, int((now - METRICS_KEPT).timestamp()))

    async def _start_jobs(self) -> None:
        while len(self._runs) < self._parts.settings.concurrent_jobs:
            job = await asyncio.to_thread(self._claim)
            if job is None:
                return
            await self._start(job)

    def _claim(self) -> Row | None:
        database = self._parts.database
        with database.read() as connection:
            if not _claimable(connection, self._parts):
                return None
        with database.write() as connection:
            now = self._parts.clock()
            job = leases.claim(connection, self._owner, now)
            if job is not None:
                if job["attempt"] == 1:
                    emit(connection, "fine_tuning.job.started", dict(job), now, status="running")
                text = f"attempt {job['attempt']} starts"
                job_records.add_log(connection, job["id"], now, "info", text)
            return job

    async def _start(self, job: Row) -> None:
        claim = Claim(job["id"], job["attempt"])
        folder = training_runs.attempt_folder(self._work, claim)
        try:
            await asyncio.to_thread(self._prepare, job, folder)
        except (DataDamaged, FileNotFoundError) as damage:
            text = str(damage) if isinstance(damage, DataDamaged) else "a stored file is missing"
            with suppress(LeaseLost):
                await asyncio.to_thread(self._failed, claim, job, "data_unreadable", text)
            return
        spec = WorkerSpec("tuneship.training", (str(folder),), folder / "worker.log")
        worker = self._runtime.start(spec)
        self._runs.append(TrainingRun(claim, job, folder, worker, self._parts.clock()))

    def _prepare(self, job: Row, folder: Path) -> None:
        base = self._parts.catalogue.get(job["base_model"])
        if base is None:
            raise DataDamaged("the base model is no longer in the catalogue")
        with self._parts.database.read() as connection:
            training = self._file(connection, job, job["dataset_id"])
            named = job["validation_dataset_id"]
            validation = None if named is None else self._file(connection, job, named)
        training_runs.write_spec(folder, self._parts.blobs, job, (training, validation), base.path)

    def _file(self, connection: sa.Connection, job: Row, dataset_id: str) -> Row:
        row = rows.fetch(connection, tables.datasets, dataset_id, client_id=job["client_id"])
        if row is None:
            raise DataDamaged("a dataset of the job no longer exists")
        if sha256_of(self._parts.blobs.local(row["blob"])) != row["sha256"]:
            raise DataDamaged("a stored dataset is damaged")
        return row

    async def _follow_alone(self, run: TrainingRun) -> None:
        """One job's trouble must not stop the others."""
        try:
            await self._follow(run)
        except (KeyError, TypeError, ValueError):  # its process writes what is no progress line
            logger.exception("a training process broke the protocol: %s", run.claim.job_id)
            run.worker.kill()
            with suppress(LeaseLost):
                text = "the training process reported something unreadable"
                await asyncio.to_thread(self._failed, run.claim, run.job, "internal", text)
            self._runs.remove(run)
        except Exception:  # e.g. the disk is full: the next tick tries again
            logger.exception("a job could not be followed: %s", run.claim.job_id)

    async def _follow(self, run: TrainingRun) -> None:
        """Read progress, keep the lease, pass a cancellation on, and finish what has ended."""
        exit_code = run.worker.exit_code()  # before reading: nothing is written after it
        try:
            await asyncio.to_thread(self._take_progress, run)
            if exit_code is not None:
                await asyncio.to_thread(self._finish, run, exit_code)
        except LeaseLost:
            run.worker.kill()
            exit_code = -1
            logger.warning("lease lost: %s", run.claim.job_id)
        if exit_code is not None:
            self._runs.remove(run)
        elif run.is_overdue(self._parts.clock(), CANCEL_PATIENCE):
            run.worker.kill()

    def _take_progress(self, run: TrainingRun) -> None:
        while True:
            now, (lines, offset) = self._parts.clock(), run.new_lines(LINES_AT_ONCE)
            if lines or now - run.last_beat >= BEAT_EVERY:
                with self._parts.database.write() as connection:
                    leases.beat(connection, run.claim, now)
                    self._store_lines(connection, run, lines)
                run.last_beat, run.offset = now, offset
            if len(lines) < LINES_AT_ONCE:
                break
        with self._parts.database.read() as connection:
            row = rows.fetch(connection, tables.jobs, run.claim.job_id, client_id=None)
        if row is not None and row["status"] == JobStatus.CANCELLING:
            run.ask_to_cancel(now)

    def _store_lines(
        self, connection: sa.Connection, run: TrainingRun, lines: list[dict[str, Any]]
    ) -> None:
        now, job_id = self._parts.clock(), run.claim.job_id
        steps = [line for line in lines if line["kind"] == "step"]
        metrics = [{name: step[name] for name in STEP_FIELDS} for step in steps]
        job_records.put_metrics(connection, job_id, metrics)
        if steps:
            last = steps[-1]
            run.last_step = last["step"]
            leases.write(
                connection,
                run.claim,
                updated_at=now,
                current_step=last["step"],
                current_epoch=last["current_epoch"],
                training_loss=last["training_loss"],
                validation_loss=last["validation_loss"],
            )
        for line in lines:
            self._store_line(connection, run, line)

    def _store_line(
        self, connection: sa.Connection, run: TrainingRun, line: dict[str, Any]
    ) -> None:
        now, job = self._parts.clock(), run.job
        if line["kind"] == "started":
            resumed_from: int = line["resumed_from_step"] or 0
            run.first_step = resumed_from
            run.last_step = max(
                run.last_step, resumed_from
            )  # steps read together with it came first
            totals = {name: line[name] for name in ("total_steps", "total_epochs")}
            leases.write(connection, run.claim, updated_at=now, **totals)
            text = f"training {line['training_examples']} examples in {line['total_steps']} steps"
            job_records.add_log(connection, job["id"], now, "info", text)
        elif line["kind"] == "epoch":
            losses = {name: line[name] for name in ("epoch", "training_loss", "validation_loss")}
            emit(connection, "fine_tuning.job.epoch_completed", dict(job), now, **losses)
            text = f"epoch {line['epoch']}: validation loss {line['validation_loss']:.4f}"
            job_records.add_log(connection, job["id"], now, "info", text)
        elif line["kind"] == "log":
            job_records.add_log(connection, job["id"], now, line["level"], line["message"])
        elif line["kind"] in ENDS:
            run.end = line

    def _finish(self, run: TrainingRun, exit_code: int) -> None:
        """What the process's end means: a model, a failure, a cancellation, or another attempt."""
        end = run.end or {"kind": None}
        if run.cancelled_at is not None:
            with self._parts.database.write() as connection:
                self._cancelled(connection, run.claim, run.job)
        elif end["kind"] == "completed":
            self._completed(run, end)
        elif end["kind"] == "failed":
            self._failed(run.claim, run.job, end["reason"], end["message"])
        elif not self._again(run, exit_code):
            return
        training_runs.clear(self._work, run.claim.job_id)

    def _again(self, run: TrainingRun, exit_code: int) -> bool:
        """Queue another attempt, or give up; answers whether the job has ended."""
        advanced = run.first_step is not None and run.last_step > run.first_step
        fruitless = 0 if advanced else run.job["attempts_without_progress"] + 1
        if fruitless >= FRUITLESS_ATTEMPTS:
            text = f"{fruitless} attempts ended without progress (exit code {exit_code})"
            self._failed(run.claim, run.job, "no_progress", text)
            return True
        now = self._parts.clock()
        with self._parts.database.write() as connection:
            leases.end(
                connection,
                run.claim,
                status=JobStatus.QUEUED,
                owner=None,
                updated_at=now,
                attempts_without_progress=fruitless,
            )
            text = f"the training process ended with {exit_code}; it resumes from its checkpoint"
            job_records.add_log(connection, run.claim.job_id, now, "warning", text)
        return False

    def _completed(self, run: TrainingRun, end: dict[str, Any]) -> None:
        job, now = run.job, self._parts.clock()
        blob = f"models/{job['id']}"
        digests = {
            file.name: self._parts.blobs.put(file, f"{blob}/{file.name}")
            for file in sorted(Path(end["adapter_dir"]).iterdir())
        }
        identifier = model_id(job["base_model"], job["model_name"], job["id"])
        with self._parts.database.write() as connection:
            leases.end(
                connection,
                run.claim,
                status=JobStatus.COMPLETED,
                completed_at=now,
                updated_at=now,
                fine_tuned_model=identifier,
                validation_loss=end["validation_loss"],
            )
            model = {
                "id": identifier,
                "client_id": job["client_id"],
                "created_at": now,
                "updated_at": now,
                "tags": job["tags"],
                "base_model": job["base_model"],
                "name": job["model_name"],
                "job_id": job["id"],
                "fine_tuning_method": job["fine_tuning_method"],
                "blob": blob,
                "sha256": digests,
            }
            rows.insert(connection, tables.models, model)
            text = f"completed; the model is the state after step {end['best_step']}"
            job_records.add_log(connection, job["id"], now, "info", text)
            emit(
                connection,
                "fine_tuning.job.succeeded",
                dict(job),
                now,
                status=JobStatus.COMPLETED,
                fine_tuned_model=identifier,
            )

    def _failed(self, claim: Claim, job: Row, reason: str, message: str) -> None:
        now = self._parts.clock()
        error = {"code": "fine_tuning_error", "reason": reason, "message": message}
        with self._parts.database.write() as connection:
            leases.end(connection, claim, status=JobStatus.FAILED, error=error, updated_at=now)
            job_records.add_log(connection, job["id"], now, "error", f"{reason}: {message}")
            emit(connection, "fine_tuning.job.failed", dict(job), now, status="failed")

    def _cancelled(self, connection: sa.Connection, claim: Claim, job: Row) -> None:
        now = self._parts.clock()
        leases.write(
            connection, claim, status=JobStatus.CANCELLED, lease_until=None, updated_at=now
        )
        job_records.add_log(connection, job["id"], now, "info", "cancelled")
        emit(connection, "fine_tuning.job.cancelled", dict(job), now, status="cancelled")


class DataDamaged(Exception):
    """What the job was promised is not there any more."""


def _claimable(connection: sa.Connection, parts: Parts) -> bool:
    table = tables.jobs
    lapsed = (table.c.status == JobStatus.RUNNING) & (table.c.lease_until < parts.clock())
    return rows.count(connection, table, (table.c.status == JobStatus.QUEUED) | lapsed) > 0


def _abandoned(connection: sa.Connection, running: set[str]) -> list[Row]:
    """Jobs to cancel that no process works on: never started, or their service died."""
    query = sa.select(tables.jobs).where(tables.jobs.c.status == JobStatus.CANCELLING)
    return [dict(row) for row in connection.execute(query).mappings() if row["id"] not in running]
