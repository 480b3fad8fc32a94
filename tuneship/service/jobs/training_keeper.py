"""Runs jobs: starts them in their order, follows their trainings, and decides what each end means for the job.

Called at every tick of the supervisor. Whatever it knows can be lost: rows and checkpoints suffice.
Next: `preparation.py` (what is checked before a start), `launcher.py` (trainings), `record_progress.py` (their lines),
`ends.py` (their ends as rows), `tuneship/store/records/job_queue.py` (whose turn it is).
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from tuneship.contract.jobs import JobStatus
from tuneship.host.thread_pools import Threads
from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.background.background_retries import (
    BackgroundRetries,
    error_kind,
    passes_by_itself,
)
from tuneship.service.context.notifier import Notifier
from tuneship.service.jobs import record_progress
from tuneship.service.jobs.attempts import Attempt, RunningAttempt, remaining_seconds
from tuneship.service.jobs.ends import JobEnds, model_key
from tuneship.service.jobs.launcher import TrainingLauncher, TrainingNews, TrainingProgress
from tuneship.service.jobs.preparation import DataDamaged, TrainingPreparation
from tuneship.service.models.safeguards import SafeguardLost
from tuneship.store.cluster.leader_lease import LeadershipLost
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import JobRow
from tuneship.store.records import job_leases, job_queue, job_records
from tuneship.store.records.job_leases import JobLease, LeaseLost
from tuneship.training.progress_file import NEEDS_LESS_MEMORY, Reason
from tuneship.training.spec import SIGNALLED

logger = logging.getLogger(__name__)

# Pause before jobs are looked for again.
AFTER_A_FAILURE_S = 1.0
# Tries to follow a training whose trouble is neither the disk nor the database: about two minutes.
TRIES = 10
# A training ends by itself after the step in which the job's maximum runtime is over; beyond this it is killed.
OVERTIME = timedelta(minutes=5)
FRUITLESS_ATTEMPTS = 3
# Pauses before the second and the third attempt to start a training; other jobs start meanwhile.
START_AGAIN_AFTER = (timedelta(seconds=10), timedelta(seconds=30))
# The timeout of the last transaction; together with those of `leader_work.py` less than `shutdown.TASKS_END_S`.
RELEASE_S = 2.0
# Progress lines in one transaction.
LINES_AT_ONCE = 500
# Exit codes of a training whose process was killed, or one of the processes that it started.
KILLED = (-signal.SIGKILL, SIGNALLED + signal.SIGKILL)
# What a training process raises in its reader when it writes something that is no progress line.
UNREADABLE = (KeyError, TypeError, ValueError)


class TrainingKeeper:
    """The jobs that this service works on."""

    def __init__(  # noqa: PLR0913 - all that it uses, by name
        self,
        *,
        database: Database,
        notifier: Notifier,
        clock: Callable[[], datetime],
        preparation: TrainingPreparation,
        ends: JobEnds,
        launcher: TrainingLauncher,
        owner: str,
        threads: Threads,
        concurrent_jobs: int,
        cancel_patience: timedelta,
    ) -> None:
        """`owner`: this process in lease rows; `threads`: for the database and for checking files.

        `cancel_patience`: a training that is cancelled is ended after this time.
        """
        self._database, self._notifier, self._clock = database, notifier, clock
        self._preparation = preparation
        self._ends = ends
        self._concurrent_jobs = concurrent_jobs
        self._cancel_patience = cancel_patience
        self._launcher = launcher
        self._owner = owner
        self.threads = threads
        self._runs: list[RunningAttempt] = []
        self._starting: asyncio.Task[None] | None = None
        # The job whose files are being checked, before it has a training.
        self._preparing: JobLease | None = None
        # The earliest next attempts of jobs whose training could not be started.
        self._not_before: dict[str, datetime] = {}
        self._retries = BackgroundRetries(clock, TRIES)

    def held(self) -> list[JobLease]:
        """The jobs that this service works on; may be called from any thread."""
        preparing = self._preparing
        return [*([] if preparing is None else [preparing]), *(run.claim for run in [*self._runs])]

    async def tick(self) -> bool:
        """Start, follow and end jobs as due. Call it on the main thread, and often while it returns that jobs run."""
        await self._cancel_abandoned()
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_jobs())
        for run in list(self._runs):
            await self._follow_safely(run)
        if all(run.last_step for run in self._runs) and not self._preparing:
            self._launcher.preload(self._clock())
        return bool(self._runs) or self._preparing is not None

    async def stop(self) -> None:
        """End all trainings with the service; their jobs resume from checkpoints later."""
        if self._starting is not None:
            self._starting.cancel()
        await self._launcher.stop()

    def given_up(self) -> list[JobLease]:
        """The jobs of `held` that another process may claim at once, since no process trains them."""
        running = {run.claim for run in self._runs if run.training.is_running}
        return [claim for claim in self.held() if claim not in running]

    async def release(self) -> None:
        """Let another process claim the jobs that ran here, whose processes have ended."""
        held = self.given_up()
        if not held:
            return

        def release() -> None:
            with self._database.write_beside() as connection:
                job_leases.release(connection, held, self._clock())

        try:
            async with asyncio.timeout(RELEASE_S):
                await Threads("job leases", 1).run(release)
        except (LeadershipLost, SQLAlchemyError, TimeoutError) as error:  # they lapse in any case
            logger.warning("leases of jobs were not given back: %s", type(error).__name__)

    # Jobs that are cancelled while nothing trains them.

    async def _cancel_abandoned(self) -> None:
        """Cancel jobs that never started, or whose service died."""
        known = {claim.job_id for claim in self.held()}
        for job in await self.threads.run(self._cancelling):
            if job["id"] in known or self._retries.is_waiting(job["id"]):
                continue
            try:
                await self._store_earlier(job)
                claim = JobLease.of(job)
                await self.threads.run(self._ends.cancel, claim)
                await self._launcher.clear(job["id"])
            except Exception as error:  # one job's trouble must not stop the others
                logger.exception("a job could not be cancelled: %s", job["id"])
                self._retries.add(job["id"], error)

    def _cancelling(self) -> list[JobRow]:
        with self._database.read() as connection:
            return rows.matching(
                connection, tables.jobs, tables.jobs.c.status == JobStatus.CANCELLING
            )

    # Starting.

    async def _start_jobs(self) -> None:
        """Start jobs one after another, apart from the ticks: checking a big file must not delay running jobs."""
        try:
            while len(self._runs) < self._concurrent_jobs:
                job = await self.threads.run(self._claim)
                if job is None:
                    return
                await self._start(job)
        except Exception as error:  # the next tick tries again, and others first
            logger.exception("a job could not be started")
            if self._preparing is not None:
                self._retries.add(self._preparing.job_id, error)
            await asyncio.sleep(AFTER_A_FAILURE_S)
        finally:
            self._preparing = None

    def _claim(self) -> JobRow | None:
        now = self._clock()
        self._not_before = {job_id: at for job_id, at in self._not_before.items() if at > now}
        held = [claim.job_id for claim in self.held()]
        skipped = [*held, *self._not_before, *self._retries.waiting()]
        # The queue is long, so it is read before the transaction, for which the tenant's other writers would wait. A
        # job that has left it meanwhile, e.g. by a cancellation, is not claimed.
        with self._database.read() as connection:
            first = job_queue.first_in_line(connection, now, skipped)
        if first is None:
            return None

        with self._database.write(first.client_id) as connection:
            now = self._clock()
            job = job_leases.claim(connection, first.job_id, self._owner, now)
            if job is not None:
                self._preparing = JobLease.of(job)
                if job["attempt"] == 1:
                    record_progress.emit_event(connection, job["id"], "started", now)
                text = f"attempt {job['attempt']} starts"
                job_records.add_log(connection, job["id"], now, "info", text)
        if job is not None:
            self._notifier.notify(job["id"])
        return job

    async def _start(self, job: JobRow) -> None:
        """Start the job's training; where that is impossible, the job fails at once or waits for another attempt."""
        claim = JobLease.of(job)
        try:
            await self._store_earlier(job)
            order = await self.threads.run(self._preparation.order, job)
            row = await self.threads.run(self._claimed_row, claim)
            if row["status"] != JobStatus.RUNNING:
                # Cancelled while its files were checked: from now on it is a cancelled job without a training.
                self._preparing = None
                return
            training = await self._launcher.start(order)
        except LeaseLost:
            self._preparing = None
            return
        except (SafeguardLost, DataDamaged, ObjectDamaged) as error:
            reason, message = "data_unreadable", str(error)
            if isinstance(error, SafeguardLost):
                reason = "not_enforced"
                message += "; make the job again when it can, or without the setting"
            await self._fail(claim, reason, message)
            return
        except Exception as error:
            logger.exception("a job could not be started: %s", claim.job_id)
            await self._start_again(claim, job, error)
            return
        latest_end = self._clock() + timedelta(seconds=remaining_seconds(job)) + OVERTIME
        self._runs.append(
            RunningAttempt(claim, claim.attempt, job=job, training=training, latest_end=latest_end)
        )
        self._retries.end(claim.job_id)
        self._preparing = None

    def _claimed_row(self, claim: JobLease) -> JobRow:
        """Read the job's row. Raises `LeaseLost` when the job is not this attempt's any more."""
        with self._database.read() as connection:
            row = rows.fetch(connection, tables.jobs, claim.job_id, client_id=None)
        if row is None or row["attempt"] != claim.attempt:
            raise LeaseLost(claim.job_id)
        return row

    async def _start_again(self, claim: JobLease, job: JobRow, error: Exception) -> None:
        """Queue a job again after a failed start, or give up after three attempts without progress."""
        why, now = error_kind(error), self._clock()
        # A database or a store that does not answer is no attempt: it would fail every waiting job.
        fruitless = job["attempts_without_progress"] + (not passes_by_itself(error))
        if fruitless >= FRUITLESS_ATTEMPTS:
            message = (
                f"{fruitless} attempts ended without progress: the training process could not be started ({why}); "
                "the operator finds more in the service's log"
            )
            await self._fail(claim, "no_progress", message)
            return
        pause = START_AGAIN_AFTER[max(0, fruitless - 1)]
        text = f"the training process could not be started ({why}); it is tried again in {pause.seconds} s"
        with suppress(LeaseLost):
            await self.threads.run(self._ends.requeue, claim, fruitless, text)
            self._not_before[claim.job_id] = now + pause

    # Following.

    async def _follow_safely(self, run: RunningAttempt) -> None:
        """Follow a training so that its trouble does not stop the others."""
        job_id = run.claim.job_id
        if self._retries.is_waiting(job_id):
            return
        try:
            given_up = self._retries.given_up(job_id)
            if given_up is not None:
                await self._give_up(run, "internal", str(given_up))
                return
            await self._follow(run)
            self._retries.end(job_id)
        except UNREADABLE:
            logger.exception("a training process broke the protocol: %s", job_id)
            await run.training.end()
            with suppress(LeaseLost):
                text = "the training process reported something unreadable"
                await self.threads.run(self._ends.fail, run.claim, "internal", text)
            self._runs.remove(run)
        except Exception as error:  # a full disk is waited for until the job's time is over
            logger.exception("a job could not be followed: %s", job_id)
            self._retries.add(job_id, error, counts=not isinstance(error, OSError))
            if self._clock() > run.latest_end:
                await self._end_late(run)

    async def _follow(self, run: RunningAttempt) -> None:
        """Store progress, which renews the lease; pass a cancellation on; finish ended attempts."""
        try:
            exit_code = await self._store_progress(run, run.training)
            if run.checkpoint is not None:
                run.training.keep_only(run.checkpoint)
            row = await self.threads.run(self._claimed_row, run.claim)
            if row["status"] == JobStatus.CANCELLING and run.cancelled_at is None:
                run.cancelled_at = self._clock()
                await run.training.cancel()
                self._notifier.notify(run.claim.job_id)
            if exit_code is None and run.has_model():
                exit_code = 0  # the model is complete, however its process leaves
            if exit_code is not None:
                await self._finish(run, exit_code)
        except LeaseLost:
            exit_code = -1
            logger.warning("lease lost: %s", run.claim.job_id)

        if exit_code is not None:
            await run.training.end()
            self._runs.remove(run)
        elif run.is_overdue(self._clock(), self._cancel_patience):
            await run.training.end()
        elif self._clock() > run.latest_end:
            await self._end_late(run)

    async def _store_earlier(self, job: JobRow) -> None:
        """Store progress of earlier attempts that their service could not store before it died; the next attempt
        continues it.
        """
        claim, stored = JobLease.of(job), job["progress_attempt"]
        for number in range(max(1, stored), job["attempt"] + 1):
            offset = job["progress_offset"] if number == stored else 0
            try:
                progress = self._launcher.earlier(job["id"], number)
                await self._store_progress(Attempt(claim, number, offset), progress)
            except (*UNREADABLE, OSError):  # the machine died while a line was written
                logger.exception("an attempt left unreadable progress: %s", job["id"])

    async def _store_progress(self, attempt: Attempt, progress: TrainingProgress) -> int | None:
        """Store all new lines and return the exit code, None while the training runs. Raises `LeaseLost`."""
        while True:
            news = await progress.news(attempt.offset, LINES_AT_ONCE)
            if not news.lines and news.checkpoint == attempt.checkpoint:
                return news.exit_code
            await self.threads.run(self._store_lines, attempt, news)

    def _store_lines(self, attempt: Attempt, news: TrainingNews) -> None:
        """Store lines and the offset after them in one transaction, so that each line counts once even after a crash.

        A new checkpoint is named in the same one: what the job goes on from is never behind what its row says.
        """
        now = self._clock()
        with self._database.write(attempt.claim.client_id) as connection:
            position: dict[str, Any] = {
                "progress_attempt": attempt.number,
                "progress_offset": news.offset,
            }
            if news.checkpoint is not None:
                position["checkpoint"] = asdict(news.checkpoint)
            job_leases.heartbeat(connection, attempt.claim, now, **position)
            record_progress.store_lines(connection, attempt, news.lines, now)
        attempt.offset, attempt.checkpoint = news.offset, news.checkpoint
        self._notifier.notify(attempt.claim.job_id)

    # Ending.

    async def _finish(self, run: RunningAttempt, exit_code: int) -> None:
        """Make of a training's end a model, a failure, a cancellation, or another attempt."""
        claim, end = run.claim, run.end or {"kind": None}
        if run.cancelled_at is not None:
            await self.threads.run(self._ends.cancel, claim)
        elif end["kind"] == "completed":
            digests = await run.training.store_result(model_key(run.job))
            await self.threads.run(self._ends.complete, claim, run.job, end, digests)
        elif end["kind"] == "failed":
            await self.threads.run(self._ends.fail, claim, end["reason"], end["message"])
        else:
            before = run.job["attempts_without_progress"]
            fruitless = 0 if await run.has_advanced() else before + 1
            if fruitless < FRUITLESS_ATTEMPTS:
                text = (
                    f"the training process ended with {exit_code}; it resumes from its checkpoint"
                )
                await self.threads.run(self._ends.requeue, claim, fruitless, text)
                return
            reason = "no_progress"
            message = f"{fruitless} attempts ended without progress (exit code {exit_code})"
            if exit_code in KILLED:
                # Nobody but the system kills a training process that its service still wants.
                reason = Reason.OUT_OF_MEMORY.value
                message = (
                    f"the system killed the training process in {fruitless} attempts that got no further, as it does "
                    f"when the machine's memory is over; {NEEDS_LESS_MEMORY}"
                )
            await self.threads.run(self._ends.fail, claim, reason, message)
        await self._launcher.clear(claim.job_id)

    async def _end_late(self, run: RunningAttempt) -> None:
        """End a training that hangs in a step, or whose results cannot be recorded, when the job's time is over."""
        text = "the job's maximum runtime was over before the training process and its results were dealt with"
        await self._give_up(run, "max_runtime_exceeded", text)

    async def _give_up(self, run: RunningAttempt, reason: str, message: str) -> None:
        await run.training.end()
        await self._fail(run.claim, reason, message)
        self._runs.remove(run)
        self._retries.end(run.claim.job_id)

    async def _fail(self, claim: JobLease, reason: str, message: str) -> None:
        """End the job with an error, unless it is another attempt's now, and remove its files."""
        with suppress(LeaseLost):
            await self.threads.run(self._ends.fail, claim, reason, message)
            await self._launcher.clear(claim.job_id)
