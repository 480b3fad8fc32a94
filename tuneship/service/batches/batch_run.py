"""One batch, from the check of its file to its end. A restarted service begins it again from its row."""

from collections.abc import Sequence
from typing import BinaryIO

from tuneship.contract.common import count
from tuneship.contract.openai.batches import BatchError, BatchStatus
from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.answering import BackgroundAnswer, BackgroundCaller
from tuneship.service.background_requests.background_run import BackgroundRun, BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.batches.input_lines import check_input, requests_of
from tuneship.service.batches.output_lines import OPERATIONS
from tuneship.service.batches.stored_answers import BatchStore, OverQuota
from tuneship.service.context.context import NewContext
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import BatchRow


class BatchRun:
    """The work on one batch."""

    def __init__(
        self,
        store: BatchStore,
        new_context: NewContext,
        batch: BatchRow,
        pace: BackgroundPace,
        threads: Threads,
        timing: BackgroundTiming,
    ) -> None:
        """`batch`: its row, just read."""
        self._store = store
        self._batch = batch
        self._threads = threads
        operation, _ = OPERATIONS[batch["endpoint"]]
        caller = BackgroundCaller(batch["client_id"], batch["caller"], operation.name, batch["id"])
        self.requests = BackgroundRun(new_context, caller, pace, threads, timing)
        if batch["status"] == BatchStatus.CANCELLING:
            self.requests.cancel("batch_cancelled")
        elif batch["expired_at"] is not None or store.clock() >= batch["expires_at"]:
            self.requests.cancel("batch_expired")

    async def run(self) -> None:
        """Work until the batch has ended. Raises `BatchLost`, `OSError` and SQLAlchemy's errors."""
        errors: list[BatchError] = []
        if self._batch["status"] == BatchStatus.VALIDATING and not await self._is_valid():
            return
        # One that was cancelled before its file was checked has nothing to go through.
        if self._batch["status"] != BatchStatus.FINALIZING and self._batch["total"]:
            with await self._threads.run(self._open) as source:
                stored = self._batch["completed"] + self._batch["failed"]
                requests = requests_of(source, self._batch["endpoint"], stored)
                try:
                    await self.requests.run(requests, self._store_answers)
                except OverQuota as over:
                    self._batch = over.batch
                    errors.append(self._over_quota())
        await self._finish(errors)

    def _open(self) -> BinaryIO:
        with self._store.database.read() as connection:
            file = rows.fetch(
                connection,
                tables.batch_files,
                self._batch["input_file_id"],
                client_id=self._batch["client_id"],
            )
        if file is None:
            raise FileNotFoundError("the file of a batch has no row")
        return self._store.open(file)

    async def _is_valid(self) -> bool:
        """Check the file; one with a problem ends the batch."""
        with await self._threads.run(self._open) as source:
            total, problems = await self._threads.run(check_input, source, self._batch["endpoint"])
        batch, before = self._batch, [BatchStatus.VALIDATING]
        if problems:
            failed = BatchStatus.FAILED
            await self._threads.run(self._store.end, batch, failed, before, problems)
            return False
        self._batch = await self._threads.run(
            self._store.change_state,
            batch,
            before,
            status=BatchStatus.IN_PROGRESS,
            in_progress_at=self._store.clock(),
            total=total,
        )
        return True

    def _store_answers(self, answers: Sequence[BackgroundAnswer]) -> None:
        """Store answers, and before the first one that says so, that the time of the batch is up."""
        if self.requests.why_not == "batch_expired" and self._batch["expired_at"] is None:
            before = [BatchStatus.IN_PROGRESS]
            expired_at = self._store.clock()
            self._batch = self._store.change_state(self._batch, before, expired_at=expired_at)
        self._batch = self._store.store(self._batch, answers)

    def _over_quota(self) -> BatchError:
        kept = self._batch["completed"] + self._batch["failed"]
        most = self._store.settings.maximum_dataset_bytes
        text = (
            f"The files of this client may hold {most} bytes in all. The answers to the first "
            f"{count(kept, 'request')} are kept: delete files, and send the other requests in a new batch."
        )
        return BatchError(code="insufficient_quota", message=text)

    async def _finish(self, errors: list[BatchError]) -> None:
        """Make a batch's output files and end it; `errors` explains the unanswered requests."""
        batch, before = self._batch, BatchStatus(self._batch["status"])
        status = BatchStatus.COMPLETED
        if before is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        elif errors:
            status = BatchStatus.FAILED
        elif before is BatchStatus.IN_PROGRESS:
            finalizing = {"status": BatchStatus.FINALIZING, "finalizing_at": self._store.clock()}
            batch = await self._threads.run(self._store.change_state, batch, [before], **finalizing)
            before = BatchStatus.FINALIZING
        if batch["expired_at"] is not None and status is not BatchStatus.CANCELLED:
            status = BatchStatus.EXPIRED
        await self._threads.run(self._store.end, batch, status, [before], errors)
