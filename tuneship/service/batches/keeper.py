"""Works on the batches that have not ended; the supervisor runs it.

It keeps no state that matters: the rows say where each batch is, and after a kill it goes on from what was stored. A
batch whose work fails by a fault of the service is tried a few times, then it is `failed`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from tuneship.contract.openai.batches import OPEN, BatchError, BatchStatus
from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import Ticks
from tuneship.service.background.background_retries import BackgroundRetries
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.batches.batch_run import BatchRun
from tuneship.service.batches.stored_answers import BatchLost, BatchStore
from tuneship.service.context.context import NewContext
from tuneship.store.database.tables import BatchRow
from tuneship.store.records import api_key_records, batch_records

logger = logging.getLogger(__name__)

# Batches that are worked on at the same time, of one tenant and of all; the others wait, the oldest first. A tenant
# that has none at work is let in beyond the second number, since the others' batches may take a day.
AT_ONCE_EACH = 2
AT_ONCE = 8
# The states in which a batch asks models, or is going to.
ASKING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


def to_start(waiting: Sequence[BatchRow], running: Mapping[str, int]) -> list[BatchRow]:
    """Choose the waiting batches to start, oldest first. Every tenant gets a first batch before any gets a second.

    `running`: how many batches of each tenant are at work.
    """
    counts, chosen = Counter(running), dict[str, BatchRow]()
    for number in range(AT_ONCE_EACH):
        for row in waiting:
            client = row["client_id"]
            has_place = number == 0 or counts.total() < AT_ONCE
            if counts[client] == number and has_place and row["id"] not in chosen:
                counts[client] += 1
                chosen[row["id"]] = row
    return [*chosen.values()]


class BatchKeeper:
    """The loop over batches, and a task for each that is worked on."""

    def __init__(self, *, store: BatchStore, new_context: NewContext, pace: BackgroundPace) -> None:
        """Begin with no batch at work. `pace`: of the requests of all batches."""
        self._store = store
        self._new_context = new_context
        self._pace = pace
        self._ticks = Ticks()
        self._retries = BackgroundRetries(store.clock)
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Batches that are being cancelled because their key has ended.
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.threads = Threads("batches", 4)
        self.timing = BackgroundTiming()

    async def run(self) -> None:
        """Work until cancelled; what was not stored by then is answered again after the next start."""
        try:
            with self._store.database.listening(self._ticks.wake):
                await self._ticks.repeat(self._look)
        finally:
            tasks = [*self._tasks.values(), *self._ending.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        found, ended_keys = await self.threads.run(self._open_batches)
        self._retries.keep_only([row["id"] for row in found])
        waiting: list[BatchRow] = []
        for row in found:
            run, status = self._runs.get(row["id"]), row["status"]
            if row["caller"]["key_id"] in ended_keys and status in ASKING:
                if row["id"] not in self._ending:
                    # In a task: its tenant's writer may be busy.
                    self._ending[row["id"]] = asyncio.create_task(self._cancel(row))
            elif run is None and not self._retries.is_waiting(row["id"]):
                # One that asks for nothing more needs no place.
                if status in ASKING:
                    waiting.append(row)
                else:
                    self._start(row)
            elif run is not None and status == BatchStatus.CANCELLING:
                run.requests.cancel("batch_cancelled")
            elif run is not None and self._store.clock() >= row["expires_at"]:
                run.requests.cancel("batch_expired")
        asking = [one for one in found if one["id"] in self._runs and one["status"] in ASKING]
        for row in to_start(waiting, Counter(one["client_id"] for one in asking)):
            self._start(row)

    def _open_batches(self) -> tuple[Sequence[BatchRow], set[str]]:
        """The batches, and the keys among theirs that have ended."""
        with self._store.database.read() as connection:
            found = batch_records.open_batches(connection)
            keys = {row["caller"]["key_id"] for row in found}
            return found, api_key_records.ended(connection, keys, self._store.clock())

    async def _cancel(self, row: BatchRow) -> None:
        """Cancel a batch whose key has ended."""
        try:
            await self.threads.run(self._store.cancel_for_its_key, row)
            if row["id"] in self._runs:
                self._runs[row["id"]].requests.cancel("batch_cancelled")
        except BatchLost:
            pass
        except Exception:  # the next look tries again
            logger.exception("a batch could not be cancelled: %s", row["id"])
        finally:
            del self._ending[row["id"]]

    def _start(self, row: BatchRow) -> None:
        batch_id = row["id"]
        self._runs[batch_id] = BatchRun(
            self._store, self._new_context, row, self._pace, self.threads, self.timing
        )
        self._tasks[batch_id] = asyncio.create_task(self._work(row))

    async def _work(self, row: BatchRow) -> None:
        batch_id = row["id"]
        try:
            given_up = self._retries.given_up(batch_id)
            if given_up is None:
                await self._runs[batch_id].run()
            else:
                text = f"the batch could not be answered: {given_up}"
                errors = [BatchError(code="server_error", message=text)]
                await self.threads.run(
                    self._store.end,
                    row,
                    BatchStatus.FAILED,
                    OPEN,
                    errors,
                    has_files=False,
                )
        except BatchLost:
            pass  # its row has changed, e.g. it is being cancelled: the next look begins from there
        except Exception as error:  # the others go on, whatever fails
            logger.exception("a batch could not be worked on: %s", batch_id)
            self._retries.add(batch_id, error)
        finally:
            del self._runs[batch_id], self._tasks[batch_id]
            self._ticks.wake()
