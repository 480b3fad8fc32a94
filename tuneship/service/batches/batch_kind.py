"""Batches as the keeper of background requests works on them."""

from collections.abc import Sequence

import sqlalchemy as sa

from tuneship.contract.openai.batches import OPEN, BatchError, BatchStatus
from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.batches.batch_run import BatchRun
from tuneship.service.batches.stored_answers import BatchLost, BatchStore
from tuneship.service.context.context import NewContext
from tuneship.store.database.tables import BatchRow
from tuneship.store.records import batch_records

# The states in which a batch asks models, or is going to.
ASKING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class BatchKind:
    """See `BackgroundKind`."""

    name = "batch"
    lost: type[Exception] = BatchLost

    def __init__(self, store: BatchStore, new_context: NewContext) -> None:
        """Keep the parts of a batch's run."""
        self._store = store
        self._new_context = new_context

    def open_rows(self, connection: sa.Connection) -> Sequence[BatchRow]:
        return batch_records.open_batches(connection)

    def begin(
        self, row: BatchRow, pace: BackgroundPace, threads: Threads, timing: BackgroundTiming
    ) -> BatchRun:
        return BatchRun(self._store, self._new_context, row, pace, threads, timing)

    def is_asking(self, row: BatchRow) -> bool:
        return row["status"] in ASKING

    def why_stop(self, row: BatchRow) -> str:
        if row["status"] == BatchStatus.CANCELLING:
            return "batch_cancelled"
        return "batch_expired" if self._store.clock() >= row["expires_at"] else ""

    def cancel_for_its_key(self, row: BatchRow) -> None:
        self._store.cancel_for_its_key(row)

    def give_up(self, row: BatchRow, error: Exception) -> None:
        text = f"the batch could not be answered: {error}"
        errors = [BatchError(code="server_error", message=text)]
        self._store.end(row, BatchStatus.FAILED, OPEN, errors, has_files=False)
