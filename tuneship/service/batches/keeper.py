"""Works on the batches that have not ended; the supervisor runs it.

It keeps no state that matters: the rows say where each batch is, and after a kill it goes on from what was stored. A
batch whose work fails by a fault of the service is tried a few times, then it is `failed`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from tuneship.contract.openai.batches import OPEN, BatchError, BatchStatus
from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import Ticks
from tuneship.service.batches.batch_run import BatchRun, BatchTiming
from tuneship.service.batches.pace import BatchPace, TakeSpare
from tuneship.service.batches.stored_answers import BatchLost, end_batch
from tuneship.service.common.background_retries import BackgroundRetries
from tuneship.service.context.context import Parts
from tuneship.store import batch_records
from tuneship.store.row_types import BatchRow

logger = logging.getLogger(__name__)

# Batches that are worked on at the same time, of one tenant and of all; the others wait, the oldest first.
AT_ONCE_EACH = 2
AT_ONCE = 8


class BatchKeeper:
    """The loop over batches, and a task for each that is worked on."""

    def __init__(self, parts: Parts, take_spare: TakeSpare) -> None:
        """`take_spare` counts a request against its tenant's limit of requests, if there is enough of it left."""
        self._parts = parts
        self._pace = BatchPace(parts.in_flight, take_spare)
        self._ticks = Ticks()
        self._retries = BackgroundRetries(parts.clock)
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.threads = Threads("batches", 4)
        self.timing = BatchTiming()

    async def run(self) -> None:
        """Work until cancelled; what was not stored by then is answered again after the next start."""
        try:
            with self._parts.database.listening(self._ticks.wake):
                await self._ticks.repeat(self._look)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look(self) -> None:
        found = await self.threads.run(self._open_batches)
        self._retries.keep_only([row["id"] for row in found])
        clients = Counter(row["client_id"] for row in found if row["id"] in self._runs)
        for row in found:
            run = self._runs.get(row["id"])
            if run is not None:
                if row["status"] == BatchStatus.CANCELLING:
                    run.cancel_requests("batch_cancelled")
            elif (
                clients[row["client_id"]] < AT_ONCE_EACH
                and len(self._runs) < AT_ONCE
                and not self._retries.is_waiting(row["id"])
            ):
                clients[row["client_id"]] += 1
                self._start(row)

    def _open_batches(self) -> Sequence[BatchRow]:
        with self._parts.database.read() as connection:
            return batch_records.open_batches(connection)

    def _start(self, row: BatchRow) -> None:
        batch_id = row["id"]
        self._runs[batch_id] = BatchRun(self._parts, row, self._pace, self.threads, self.timing)
        self._tasks[batch_id] = task = asyncio.create_task(self._work(row))

        def forget(_: object) -> None:
            del self._runs[batch_id], self._tasks[batch_id]
            self._ticks.wake()

        task.add_done_callback(forget)

    async def _work(self, row: BatchRow) -> None:
        batch_id = row["id"]
        try:
            given_up = self._retries.given_up(batch_id)
            if given_up is None:
                await self._runs[batch_id].run()
            else:
                text = f"the batch could not be answered: {given_up}"
                errors = [BatchError(code="server_error", message=text).model_dump()]
                await self.threads.run(
                    end_batch, self._parts, row, BatchStatus.FAILED, OPEN, errors=errors
                )
        except BatchLost:
            pass  # its row has changed, e.g. it is being cancelled: the next look begins from there
        except Exception as error:  # the others go on, whatever fails
            logger.exception("a batch could not be worked on: %s", batch_id)
            self._retries.add(batch_id, error)
