"""One batch, from the check of its file to its end. A restarted service begins it again from its row.

Requests are answered several at a time and stored in their order. A batch that is cancelled, or whose time is up, goes
on in the same way: each request that is left gets an error instead of an answer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import BinaryIO

from tuneship.contract.openai.batches import BatchError, BatchStatus
from tuneship.host.disk_space import DiskNearlyFull
from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.service.batches.answering import (
    CheckedRequest,
    RequestAnswer,
    answer,
    checked,
    unanswered,
)
from tuneship.service.batches.input_lines import (
    InputReading,
    check_input,
    requests_of,
)
from tuneship.service.batches.pace import BatchPace, BatchShare
from tuneship.service.batches.stored_answers import (
    OverQuota,
    change_state,
    end_batch,
    store_answers,
)
from tuneship.service.context.context import Parts
from tuneship.service.openai.batch_files import open_batch_file
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import BatchRow

logger = logging.getLogger(__name__)

POLL_S = 0.05
# Requests that were begun and are not stored: one that takes long holds up no more than these.
BEGUN_AT_MOST = 256
READ_AT_ONCE = 64
# Bytes of answers, of embeddings above all, that wait in memory to be stored.
STORED_AT_BYTES = 8 << 20
# Bytes of answers that wait behind one that takes long.
HELD_AT_MOST_BYTES = 64 << 20
# The pause before answers are stored again for which the disk had no room; nothing is asked meanwhile.
ROOM_PAUSE_S = 5.0


@dataclass(frozen=True)
class BatchTiming:
    """When answers are stored, since a batch of slow ones must not consist of thousands of parts; when to retry."""

    soon_s: float = 2.0
    """Answers are stored after this time, as soon as there are `enough`."""
    enough: int = 64
    late_s: float = 30.0
    """Answers are stored after this time, as many as there are."""
    retry_after_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    """The pauses before a request is retried; after the last one its error is the answer."""


@dataclass
class _Begun:
    """A request, and the task that answers it; None for one that is not answered any more."""

    request: CheckedRequest
    task: "asyncio.Task[RequestAnswer] | None"

    @property
    def is_done(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def bytes(self) -> int:
        """The length of its answer, where a model has given one."""
        if self.task is None or not self.task.done() or self.task.cancelled():
            return 0
        return 0 if self.task.exception() is not None else len(self.task.result().line)

    def result(self, why_not: str) -> RequestAnswer:
        """The answer, or where it was cancelled the error `why_not`."""
        if self.task is None or self.task.cancelled():
            return unanswered(self.request, why_not)
        return self.task.result()


class BatchRun:
    """The work on one batch."""

    _share: BatchShare

    def __init__(
        self,
        parts: Parts,
        batch: BatchRow,
        pace: BatchPace,
        threads: Threads,
        timing: BatchTiming,
    ) -> None:
        """`batch` is its row as it was just read."""
        self._parts = parts
        self._batch = batch
        self._pace = pace
        self._threads = threads
        self._timing = timing
        self._changed = asyncio.Event()
        self._begun: deque[_Begun] = deque()
        self._answers: list[RequestAnswer] = []
        """The next answers to be stored."""
        self._held_bytes = 0
        """Bytes of the answers behind one that is still written."""
        self._stored_at = asyncio.get_running_loop().time()
        self._has_room_at = self._stored_at
        """The time before which the disk has no room."""
        self._why_not = ""
        """The code for requests that are left; empty while requests are answered."""
        if batch["status"] == BatchStatus.CANCELLING:
            self._why_not = "batch_cancelled"
        elif batch["expired_at"] is not None:
            self._why_not = "batch_expired"

    def cancel_requests(self, code: str) -> None:
        """Answer no further request, and cancel those in flight; `code` stands in the error file for each."""
        if self._why_not:
            return
        self._why_not = code
        for one in self._begun:
            if one.task is not None:
                one.task.cancel()
        self._changed.set()

    async def run(self) -> None:
        """Work until the batch has ended. Raises `BatchLost`, `OSError` and SQLAlchemy's errors."""
        errors: list[BatchError] = []
        with ExitStack() as opened:
            if self._batch["status"] == BatchStatus.VALIDATING and not await self._is_valid():
                return
            # One that was cancelled before its file was checked has nothing to go through.
            if self._batch["status"] != BatchStatus.FINALIZING and self._batch["total"]:
                source = await self._threads.run(self._open)
                opened.callback(source.close)
                skipped = self._batch["completed"] + self._batch["failed"]
                endpoint = self._batch["endpoint"]
                lines = requests_of(source, endpoint, skipped)
                requests = (checked(line, endpoint) for line in lines)
                self._share = opened.enter_context(self._pace.joined(self._batch["client_id"]))
                try:
                    await self._answer_all(requests)
                except OverQuota as over:
                    self._batch = over.batch
                    errors.append(self._over_quota())
                finally:
                    # Where the work breaks off, whoever goes on from the row sends these again.
                    begun = (one.task for one in self._begun)
                    tasks = [task for task in begun if task is not None and not task.done()]
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        await self._finish(errors)

    def _over_quota(self) -> BatchError:
        kept = self._batch["completed"] + self._batch["failed"]
        most = self._parts.settings.maximum_dataset_bytes
        text = (
            f"The files of this client may hold {most} bytes in all. The answers to the first {kept} requests are "
            "kept: delete files, and send the other requests in a new batch."
        )
        return BatchError(code="insufficient_quota", message=text)

    def _open(self) -> BinaryIO:
        with self._parts.database.read() as connection:
            file = rows.fetch(
                connection,
                tables.batch_files,
                self._batch["input_file_id"],
                client_id=self._batch["client_id"],
            )
        if file is None:
            raise FileNotFoundError("the file of a batch has no row")
        return open_batch_file(self._parts, file)

    async def _is_valid(self) -> bool:
        """Check the file; one with a problem ends the batch."""
        reading = await self._threads.run(self._read)
        before = [BatchStatus.VALIDATING]
        if reading.errors:
            errors = [one.model_dump() for one in reading.errors]
            await self._threads.run(
                end_batch, self._parts, self._batch, BatchStatus.FAILED, before, errors=errors
            )
            return False
        self._batch = await self._threads.run(
            change_state,
            self._parts,
            self._batch,
            before,
            status=BatchStatus.IN_PROGRESS,
            in_progress_at=self._parts.clock(),
            total=reading.requests,
        )
        return True

    def _read(self) -> InputReading:
        with self._open() as source:
            return check_input(source, self._batch["endpoint"])

    async def _answer_all(self, requests: Iterator[CheckedRequest]) -> None:
        """Answer and store every request."""
        waiting: deque[CheckedRequest] = deque()
        has_more = True
        while has_more or waiting or self._begun or self._answers:
            while self._begun and self._begun[0].is_done:
                first = self._begun.popleft()
                self._held_bytes -= first.bytes
                self._answers.append(first.result(self._why_not))
            is_last = not (has_more or waiting or self._begun)
            if self._answers and self._has_room() and (is_last or self._is_time_to_store()):
                await self._store()
            if has_more and not waiting:
                waiting.extend(await self._threads.run(_next_of, requests))
                has_more = bool(waiting)
            if await self._has_expired() or not self._begin_next(waiting):
                if not (self._begun and self._begun[0].is_done):
                    await wait_for_event(self._changed, POLL_S)
                self._changed.clear()

    async def _store(self) -> None:
        """Store the answers, later where the disk has no room now."""
        answers, now = self._answers, asyncio.get_running_loop().time
        try:
            self._batch = await self._threads.run(store_answers, self._parts, self._batch, answers)
        except DiskNearlyFull:
            logger.warning("a batch waits for room on the disk: %s", self._batch["id"])
            self._has_room_at = now() + ROOM_PAUSE_S
            return
        self._answers = []
        self._stored_at = now()

    def _has_room(self) -> bool:
        return asyncio.get_running_loop().time() >= self._has_room_at

    def _begin_next(self, waiting: "deque[CheckedRequest]") -> bool:
        """Begin the next request if it may begin; returns whether it did."""
        if not waiting or len(self._begun) + len(self._answers) >= BEGUN_AT_MOST:
            return False
        if self._why_not:
            self._begun.append(_Begun(waiting.popleft(), None))
            return True
        if self._parts.drain.has_begun or self._held_bytes >= HELD_AT_MOST_BYTES:
            return False
        if not self._has_room() or not self._share.take():
            return False
        request = waiting.popleft()
        task = asyncio.create_task(
            answer(self._parts, self._batch, request, self._timing.retry_after_s)
        )
        begun = _Begun(request, task)
        task.add_done_callback(lambda _: self._note_end(begun))
        self._begun.append(begun)
        return True

    def _note_end(self, begun: _Begun) -> None:
        self._share.give_back()
        self._held_bytes += begun.bytes
        self._changed.set()

    def _is_time_to_store(self) -> bool:
        if self._parts.drain.has_begun or len(self._answers) >= BEGUN_AT_MOST // 2:
            return True
        if sum(len(one.line) for one in self._answers) >= STORED_AT_BYTES:
            return True
        since, timing = asyncio.get_running_loop().time() - self._stored_at, self._timing
        is_enough = len(self._answers) >= timing.enough and since >= timing.soon_s
        return is_enough or since >= timing.late_s

    async def _has_expired(self) -> bool:
        """Note once that the time of the batch is up."""
        now = self._parts.clock()
        if self._why_not or now < self._batch["expires_at"]:
            return False
        self.cancel_requests("batch_expired")
        before = [BatchStatus.IN_PROGRESS]
        self._batch = await self._threads.run(
            change_state, self._parts, self._batch, before, expired_at=now
        )
        return True

    async def _finish(self, errors: list[BatchError]) -> None:
        """Make the files of a batch, and end it; `errors` say why requests are left."""
        batch, before = self._batch, [BatchStatus.FINALIZING]
        status = BatchStatus.COMPLETED
        if batch["status"] == BatchStatus.CANCELLING:
            status, before = BatchStatus.CANCELLED, [BatchStatus.CANCELLING]
        elif errors:
            status = BatchStatus.FAILED if batch["expired_at"] is None else BatchStatus.EXPIRED
            before = [BatchStatus.IN_PROGRESS]
        elif batch["status"] != BatchStatus.FINALIZING:
            self._batch = batch = await self._threads.run(
                change_state,
                self._parts,
                batch,
                [BatchStatus.IN_PROGRESS],
                status=BatchStatus.FINALIZING,
                finalizing_at=self._parts.clock(),
            )
        if batch["expired_at"] is not None and status is BatchStatus.COMPLETED:
            status = BatchStatus.EXPIRED
        more = {"errors": [one.model_dump() for one in errors]} if errors else {}
        await self._threads.run(partial(end_batch, self._parts, batch, status, before, **more))


def _next_of(requests: Iterator[CheckedRequest]) -> list[CheckedRequest]:
    """The next requests, none at the end; they are read and checked here, in a thread."""
    return list(islice(requests, READ_AT_ONCE))
