"""Batches as the keeper of background requests works on them."""

from collections.abc import Sequence

import sqlalchemy as sa

from tuneship.contract.openai.batches import OPEN, BatchError, BatchStatus
from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.batches.batch_run import BatchRun
from tuneship.service.batches.stored_answers import BatchLost, cancel_for_its_key, end_batch
from tuneship.service.context.context import Parts
from tuneship.store.database.tables import BatchRow
from tuneship.store.records import batch_records

# The states in which a batch asks models, or is going to.
ASKING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class BatchKind:
    """See `BackgroundKind`."""

    name = "batch"
    lost: type[Exception] = BatchLost

    def __init__(self, parts: Parts) -> None:
        """Keep what a batch's run is made of."""
        self._parts = parts

    def open_rows(self, connection: sa.Connection) -> Sequence[BatchRow]:
        return batch_records.open_batches(connection)

    def begin(
        self, row: BatchRow, pace: BackgroundPace, threads: Threads, timing: BackgroundTiming
    ) -> BatchRun:
        return BatchRun(self._parts, row, pace, threads, timing)

    def is_asking(self, row: BatchRow) -> bool:
        return row["status"] in ASKING

    def why_stop(self, row: BatchRow) -> str:
        if row["status"] == BatchStatus.CANCELLING:
            return "batch_cancelled"
        return "batch_expired" if self._parts.clock() >= row["expires_at"] else ""

    def cancel_for_its_key(self, row: BatchRow) -> None:
        cancel_for_its_key(self._parts, row)

    def give_up(self, row: BatchRow, error: Exception) -> None:
        text = f"the batch could not be answered: {error}"
        errors = [BatchError(code="server_error", message=text)]
        end_batch(self._parts, row, BatchStatus.FAILED, OPEN, errors, has_files=False)
