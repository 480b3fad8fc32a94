"""Runs jobs: starts those whose turn it is, follows their processes, and says what an end means.

Called at every tick of the supervisor; what it knows can be lost, the rows and checkpoints suffice.
Next: `attempts.py` (one process), `record_progress.py` (its lines), `tuneship/store/job_queue.py` (whose turn).
"""

import asyncio
import logging
import signal
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.host.thread_pools import Threads
from tuneship.runtime.worker_protocol import Runtime, Worker
from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.access.isolation import training_places
from tuneship.service.common.background_retries import BackgroundRetries, error_kind
from tuneship.service.context.context import Parts
from tuneship.service.datasets.handlers import object_of
from tuneship.service.jobs import attempts as training_runs
from tuneship.service.jobs import record_progress as job_progress
from tuneship.service.jobs.attempts import Attempt, RunningAttempt
from tuneship.service.jobs.warm_trainer import WarmTrainer, start_on
from tuneship.service.models.handlers import model_id
from tuneship.service.models.safeguards import SafeguardLost, check_kept, check_sealed
from tuneship.store import job_leases as leases
from tuneship.store import job_queue, job_records, tables
from tuneship.store import queries as rows
from tuneship.store.blobs import check_digest
from tuneship.store.database import is_away
from tuneship.store.job_leases import JobLease, LeaseLost
from tuneship.store.queries import Row
from tuneship.training.progress_file import NEEDS_LESS_MEMORY, Reason
from tuneship.training.spec import SIGNALLED, DataKeys, Order

logger = logging.getLogger(__name__)

# Before jobs are looked for again.
AFTER_A_FAILURE_S = 1.0
# To follow a process, where what goes wrong is neither the disk nor the database: some two
# minutes.
TRIES = 10
# Then the process is killed, so that a cancelled job's processes are gone within 5 s.
CANCEL_PATIENCE = timedelta(seconds=3.5)
# How long a training process may work past the job's maximum runtime: it ends after a step of its
# own accord.
OVERTIME = timedelta(minutes=5)
FRUITLESS_ATTEMPTS = 3
# A job whose process could not be started waits before its second and its third attempt; others
# start meanwhile.
START_AGAIN_AFTER = (timedelta(seconds=10), timedelta(seconds=30))
# Progress lines in one transaction.
LINES_AT_ONCE = 500


class DataDamaged(Exception):
    """What the job was promised is not there any more."""


class TrainingKeeper:
    """The jobs that this service works on."""

    def __init__(self, parts: Parts, runtime: Runtime, work: Path, owner: str) -> None:
        """`work`: folder for attempts and checkpoints; `owner`: this process in lease rows."""
        self._parts = parts
        self._runtime = runtime
        self._work = work
        self._owner = owner
        self._runs: list[RunningAttempt] = []
        self._starting: asyncio.Task[None] | None = None
        self._preparing: JobLease | None = None
        """The job whose files are being checked, before it has a process."""
        self._not_before: dict[str, datetime] = {}
        """When the jobs that could not be started may be tried again."""
        self._troubles = BackgroundRetries(parts.clock, TRIES)
        self.threads = Threads("training", 4)
        log = parts.settings.data_dir / "logs" / "trainer.log"
        self._places = training_places(parts.settings.data_dir, work, parts.catalogue)
        self._warm = WarmTrainer(runtime, log, self._places, parts.clock())

    def held(self) -> list[JobLease]:
        """The jobs that this service works on; may be called from any thread."""
        preparing = self._preparing
        return [*([] if preparing is None else [preparing]), *(run.claim for run in [*self._runs])]

    async def tick(self) -> None:
        """Call it often, on the main thread: processes die with the thread that started them."""
        await self.threads.run(self._cancel_abandoned)
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_jobs())
        for run in list(self._runs):
            await self._follow_alone(run)
        loaded = all(run.last_step for run in self._runs)
        if self._parts.settings.warm_trainer and loaded and not self._preparing:
            self._warm.tend(self._parts.clock())

    def stop(self) -> None:
        """End all processes; their jobs go on from their checkpoints later."""
        if self._starting is not None:
            self._starting.cancel()
        self._warm.stop()
        for run in self._runs:
            run.worker.kill()

    def _cancel_abandoned(self) -> None:
        """Jobs to cancel that no process works on: never started, or their service died."""
        now = self._parts.clock()
        query = sa.select(tables.jobs).where(tables.jobs.c.status == JobStatus.CANCELLING)
        known = {claim.job_id for claim in self.held()}
        with self._parts.database.read() as connection:
            found = [dict(row) for row in connection.execute(query).mappings()]
        for job in found:
            if job["id"] in known or self._troubles.is_waiting(job["id"]):
                continue
            try:
                self._store_left(job)
                self._cancelled(JobLease(job["id"], job["attempt"]), now)
            except Exception as error:  # one job's trouble must not stop the others
                logger.exception("a job could not be cancelled: %s", job["id"])
                self._troubles.add(job["id"], error)

    async def _start_jobs(self) -> None:
        """One after the other, beside the ticks: checking a big file must not hold up who follows the others."""
        try:
            while len(self._runs) < self._parts.settings.concurrent_jobs:
                job = await self.threads.run(self._claim)
                if job is None:
                    return
                await self._start(job)
        except Exception as error:  # the next tick tries again, and others first
            logger.exception("a job could not be started")
            if self._preparing is not None:
                self._troubles.add(self._preparing.job_id, error)
            await asyncio.sleep(AFTER_A_FAILURE_S)
        finally:
            self._preparing = None

    def _claim(self) -> Row | None:
        now = self._parts.clock()
        self._not_before = {job_id: at for job_id, at in self._not_before.items() if at > now}
        held = [claim.job_id for claim in self.held()]
        skipped = [*held, *self._not_before, *self._troubles.waiting()]
        with self._parts.database.read() as connection:
            others = tables.jobs.c.id.not_in(skipped)
            if not rows.count(connection, tables.jobs, job_queue.waiting(now), others):
                return None
        with self._parts.database.write() as connection:
            now = self._parts.clock()
            job = leases.claim(connection, self._owner, now, skipped)
            if job is not None:
                self._preparing = JobLease(job["id"], job["attempt"])
                if job["attempt"] == 1:
                    job_progress.tell(connection, job["id"], "started", now)
                text = f"attempt {job['attempt']} starts"
                job_records.add_log(connection, job["id"], now, "info", text)
        if job is not None:
            self._parts.notifier.notify(job["id"])
        return job

    async def _start(self, job: Row) -> None:
        """Start the job's process; where that is impossible, the job fails at once or waits for another attempt."""
        claim = JobLease(job["id"], job["attempt"])
        folder = training_runs.attempt_folder(self._work, job["id"], job["attempt"])
        try:
            await self.threads.run(self._store_left, job)
            keys = await self.threads.run(self._prepare, job, folder)
            if not await self.threads.run(self._may_start, claim):
                return
            worker = self._worker(Order(folder, keys))
        except LeaseLost:  # somebody has cancelled it
            return
        except (SafeguardLost, DataDamaged, ObjectDamaged) as error:
            with suppress(LeaseLost):
                await self.threads.run(self._failed, claim, job, *_why_not_started(error))
                training_runs.clear(self._work, claim.job_id)
            return
        except Exception as error:
            logger.exception("a job could not be started: %s", claim.job_id)
            with suppress(LeaseLost):
                await self.threads.run(self._start_again, claim, job, error)
            return
        now = self._parts.clock()
        latest = now + timedelta(seconds=training_runs.remaining_seconds(job)) + OVERTIME
        run = RunningAttempt(
            claim, folder, job["attempt"], job=job, worker=worker, latest_end=latest
        )
        self._troubles.end(claim.job_id)
        self._runs.append(run)
        self._preparing = None

    def _start_again(self, claim: JobLease, job: Row, error: Exception) -> None:
        """Queue a job whose process could not be started, or give up after three attempts without progress.

        A database that does not answer is no attempt: it would fail every job that waits.
        """
        why, now = error_kind(error), self._parts.clock()
        counts = not is_away(error)
        fruitless = job["attempts_without_progress"] + counts
        if fruitless >= FRUITLESS_ATTEMPTS:
            text = f"{fruitless} attempts ended without progress: the training process could not be started ({why})"
            self._failed(
                claim, job, "no_progress", f"{text}; the operator finds more in the service's log"
            )
            training_runs.clear(self._work, claim.job_id)
            return
        pause = START_AGAIN_AFTER[max(0, fruitless - 1)]
        text = f"the training process could not be started ({why}); it is tried again in {pause.seconds} s"
        self._queue_again(claim, fruitless, text)
        self._not_before[claim.job_id] = now + pause

    def _worker(self, order: Order) -> Worker:
        """The one that waits with its libraries loaded, or a new one."""
        waiting = self._warm.take(order, self._parts.clock())
        return waiting or start_on(self._runtime, order, self._places)

    def _may_start(self, claim: JobLease) -> bool:
        """Whether nobody has cancelled it while its files were checked."""
        with self._parts.database.read() as connection:
            row = rows.fetch(connection, tables.jobs, claim.job_id, client_id=None)
        if row is None or (row["attempt"], row["status"]) != (claim.attempt, JobStatus.RUNNING):
            self._preparing = None  # as a job that is to be cancelled and has no process
            return False
        return True

    def _prepare(self, job: Row, folder: Path) -> DataKeys:
        check_kept(self._parts, job["security_settings"])
        base = self._parts.catalogue.get(job["base_model"])
        if base is None:
            raise DataDamaged("the base model is no longer in the catalogue")
        with self._parts.database.read() as connection:
            training = self._file(connection, job, job["dataset_id"])
            named = job["validation_dataset_id"]
            validation = None if named is None else self._file(connection, job, named)
            key_of = partial(self._parts.keyring.find, connection, job["client_id"])
            keys = DataKeys(
                training=key_of(object_of(training)),
                validation=None if validation is None else key_of(object_of(validation)),
                checkpoints=key_of(f"jobs/{job['id']}"),
                adapter=key_of(f"models/{job['id']}"),
            )
        optional = [] if validation is None else [keys.validation]
        needed = [keys.training, keys.checkpoints, keys.adapter, *optional]
        check_sealed(job["security_settings"], needed)
        files, devices = (training, validation), self._parts.settings.training_devices
        training_runs.write_spec(folder, self._parts.blobs, job, files, base.path, devices)
        return keys

    def _file(self, connection: sa.Connection, job: Row, dataset_id: str) -> Row:
        row = rows.fetch(connection, tables.datasets, dataset_id, client_id=job["client_id"])
        if row is None:
            raise DataDamaged("a dataset of the job no longer exists")
        try:
            check_digest(self._parts.blobs.local(row["blob"]), row["sha256"])
        except ObjectDamaged:
            raise DataDamaged("a stored dataset is damaged") from None
        except FileNotFoundError:
            raise DataDamaged("a stored file is missing") from None
        return row

    async def _follow_alone(self, run: RunningAttempt) -> None:
        """One job's trouble must not stop the others."""
        job_id = run.claim.job_id
        if self._troubles.is_waiting(job_id):
            return
        try:
            given_up = self._troubles.given_up(job_id)
            if given_up is not None:
                await self._give_up(run, "internal", str(given_up))
                return
            await self._follow(run)
            self._troubles.end(job_id)
        except (KeyError, TypeError, ValueError):  # its process writes what is no progress line
            logger.exception("a training process broke the protocol: %s", run.claim.job_id)
            run.worker.kill()
            with suppress(LeaseLost):
                text = "the training process reported something unreadable"
                await self.threads.run(self._failed, run.claim, run.job, "internal", text)
            self._runs.remove(run)
        except Exception as error:  # a full disk is waited for until the job's time is over
            logger.exception("a job could not be followed: %s", job_id)
            self._troubles.add(job_id, error, counts=not isinstance(error, OSError))
            if self._parts.clock() > run.latest_end:
                await self._end_late(run)

    async def _follow(self, run: RunningAttempt) -> None:
        """Read progress, keep the lease, pass a cancellation on, and finish what has ended."""
        exit_code = run.worker.exit_code()  # before reading: nothing is written after it
        try:
            await self.threads.run(self._take_progress, run)
            if exit_code is None and run.has_model():
                exit_code = 0  # how it leaves decides nothing any more
            if exit_code is not None:
                await self.threads.run(self._finish, run, exit_code)
        except LeaseLost:
            exit_code = -1
            logger.warning("lease lost: %s", run.claim.job_id)
        if exit_code is not None:
            await self.threads.run(run.worker.kill)
            self._runs.remove(run)
        elif run.is_overdue(self._parts.clock(), CANCEL_PATIENCE):
            await self.threads.run(run.worker.kill)
        elif self._parts.clock() > run.latest_end:
            await self._end_late(run)

    async def _end_late(self, run: RunningAttempt) -> None:
        """The process ends by itself after a step; one that hangs in a step does not, nor what cannot be recorded."""
        text = "the job's maximum runtime was over before the training process and its results were dealt with"
        await self._give_up(run, "max_runtime_exceeded", text)

    async def _give_up(self, run: RunningAttempt, reason: str, message: str) -> None:
        await self.threads.run(run.worker.kill)
        with suppress(LeaseLost):
            await self.threads.run(self._failed, run.claim, run.job, reason, message)
            training_runs.clear(self._work, run.claim.job_id)
        self._runs.remove(run)
        self._troubles.end(run.claim.job_id)

    def _take_progress(self, run: RunningAttempt) -> None:
        """Store what the process has told. Raises `LeaseLost` when the job is not this attempt's any more."""
        now = self._parts.clock()
        self._store_told(run)
        with self._parts.database.read() as connection:
            row = rows.fetch(connection, tables.jobs, run.claim.job_id, client_id=None)
        if row is None or row["attempt"] != run.claim.attempt:
            raise LeaseLost(run.claim.job_id)
        if row["status"] == JobStatus.CANCELLING and not run.cancelled_at:
            run.ask_to_cancel(now)
            self._parts.notifier.notify(run.claim.job_id)

    def _store_left(self, job: Row) -> None:
        """What earlier attempts told and their service did not live to read: the next one begins behind it."""
        for attempt in training_runs.told_attempts(self._work, job):
            try:
                self._store_told(attempt)
            except (KeyError, OSError, TypeError, ValueError):  # the machine died in mid-write
                logger.exception("an attempt left unreadable progress: %s", job["id"])

    def _store_told(self, attempt: Attempt) -> None:
        """Every line once, whoever dies: where reading stands is kept with what was read."""
        while True:
            now, (lines, offset) = self._parts.clock(), attempt.new_lines(LINES_AT_ONCE)
            if lines:
                with self._parts.database.write() as connection:
                    place = {"progress_attempt": attempt.number, "progress_offset": offset}
                    leases.beat(connection, attempt.claim, now, **place)
                    job_progress.store_lines(connection, attempt, lines, now)
                attempt.offset = offset
                self._parts.notifier.notify(attempt.claim.job_id)
            if not lines:
                return

    def _finish(self, run: RunningAttempt, exit_code: int) -> None:
        """What the process's end means: a model, a failure, a cancellation, or another attempt."""
        end = run.end or {"kind": None}
        if run.cancelled_at is not None:
            self._cancelled(run.claim, self._parts.clock())
        elif end["kind"] == "completed":
            self._completed(run, end)
        elif end["kind"] == "failed":
            self._failed(run.claim, run.job, end["reason"], end["message"])
        elif not self._again(run, exit_code):
            return
        training_runs.clear(self._work, run.claim.job_id)

    def _again(self, run: RunningAttempt, exit_code: int) -> bool:
        """Queue another attempt, or give up; answers whether the job has ended."""
        fruitless = 0 if run.has_advanced() else run.job["attempts_without_progress"] + 1
        if fruitless >= FRUITLESS_ATTEMPTS:
            self._failed(run.claim, run.job, *_why_fruitless(fruitless, exit_code))
            return True
        text = f"the training process ended with {exit_code}; it resumes from its checkpoint"
        self._queue_again(run.claim, fruitless, text)
        return False

    def _queue_again(self, claim: JobLease, fruitless: int, text: str) -> None:
        now = self._parts.clock()
        with self._parts.database.write() as connection:
            kept = {"owner": None, "attempts_without_progress": fruitless}
            leases.end(connection, claim, JobStatus.QUEUED, now, **kept)
            job_records.add_log(connection, claim.job_id, now, "warning", text)
        self._parts.notifier.notify(claim.job_id)

    def _completed(self, run: RunningAttempt, end: dict[str, Any]) -> None:
        job, now = run.job, self._parts.clock()
        blob = f"models/{job['id']}"
        digests = {
            file.name: self._parts.blobs.put(file, f"{blob}/{file.name}")
            for file in sorted(Path(end["adapter_dir"]).iterdir())
        }
        identifier = model_id(job["base_model"], job["model_name"], job["id"])
        with self._parts.database.write() as connection:
            result = {"fine_tuned_model": identifier, "validation_loss": end["validation_loss"]}
            leases.end(connection, run.claim, JobStatus.COMPLETED, now, completed_at=now, **result)
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
            self._parts.keyring.destroy(connection, f"jobs/{job['id']}")
            text = f"completed; the model is the state after step {end['best_step']}"
            job_records.add_log(connection, job["id"], now, "info", text)
            job_progress.tell(connection, job["id"], "succeeded", now, fine_tuned_model=identifier)
        self._parts.notifier.notify(job["id"])

    def _failed(self, claim: JobLease, job: Row, reason: str, message: str) -> None:
        now = self._parts.clock()
        error = {"code": "fine_tuning_error", "reason": reason, "message": message}
        with self._parts.database.write() as connection:
            leases.end(connection, claim, JobStatus.FAILED, now, error=error)
            self._destroy_keys(connection, claim)
            job_records.add_log(connection, job["id"], now, "error", f"{reason}: {message}")
            job_progress.tell(connection, job["id"], "failed", now, reason=reason)
        self._parts.notifier.notify(job["id"])

    def _cancelled(self, claim: JobLease, now: datetime) -> None:
        with self._parts.database.write() as connection:
            leases.write(
                connection, claim, status=JobStatus.CANCELLED, lease_until=None, updated_at=now
            )
            self._destroy_keys(connection, claim)
            job_records.add_log(connection, claim.job_id, now, "info", "cancelled")
            job_progress.tell(connection, claim.job_id, "cancelled", now)
        training_runs.clear(self._work, claim.job_id)
        self._parts.notifier.notify(claim.job_id)

    def _destroy_keys(self, connection: sa.Connection, claim: JobLease) -> None:
        """Of a job that makes no model."""
        names = [f"{kind}/{claim.job_id}" for kind in training_runs.KEPT_OF_A_JOB]
        self._parts.keyring.destroy(connection, *names)


def _why_not_started(error: Exception) -> tuple[str, str]:
    """Reason and message."""
    if isinstance(error, SafeguardLost):
        return "not_enforced", f"{error}; make the job again when it can, or without the setting"
    return "data_unreadable", str(error)


def _why_fruitless(attempts: int, exit_code: int) -> tuple[str, str]:
    """Reason and message. Nobody but the system kills a training process that its service still wants."""
    if exit_code in (-signal.SIGKILL, SIGNALLED + signal.SIGKILL):  # itself, or another of the job
        return Reason.OUT_OF_MEMORY.value, (
            f"the system killed the training process in {attempts} attempts that got no further, as it does when "
            f"the machine's memory is over; {NEEDS_LESS_MEMORY}"
        )
    return "no_progress", f"{attempts} attempts ended without progress (exit code {exit_code})"
