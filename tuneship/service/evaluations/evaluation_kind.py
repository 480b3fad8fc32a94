"""Evaluations as the keeper of background requests works on them."""

from collections.abc import Sequence

import sqlalchemy as sa

from tuneship.contract.evaluations import create_evaluation
from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.answering import BackgroundCaller
from tuneship.service.background_requests.background_run import BackgroundRun, BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.context.context import NewContext
from tuneship.service.evaluations.evaluation_run import (
    EvaluationLost,
    EvaluationRun,
    EvaluationStore,
)
from tuneship.service.evaluations.held_out import HeldOutReader
from tuneship.store.database.tables import EvaluationRow
from tuneship.store.records import evaluation_records

KEY_ENDED = "the API key that made this evaluation was revoked or has expired"


class EvaluationKind:
    """See `BackgroundKind`."""

    name = "evaluation"
    lost: type[Exception] = EvaluationLost

    def __init__(
        self, store: EvaluationStore, reader: HeldOutReader, new_context: NewContext
    ) -> None:
        """Keep what an evaluation's run is made of."""
        self._store = store
        self._reader = reader
        self._new_context = new_context

    def open_rows(self, connection: sa.Connection) -> Sequence[EvaluationRow]:
        return evaluation_records.open_evaluations(connection)

    def begin(
        self, row: EvaluationRow, pace: BackgroundPace, threads: Threads, timing: BackgroundTiming
    ) -> EvaluationRun:
        caller = BackgroundCaller(
            row["client_id"], row["caller"], create_evaluation.name, row["id"]
        )
        requests = BackgroundRun(self._new_context, caller, pace, threads, timing)
        return EvaluationRun(self._store, self._reader, row, requests, threads)

    def is_asking(self, row: EvaluationRow) -> bool:  # noqa: ARG002 - each open one does
        return True

    def why_stop(self, row: EvaluationRow) -> str:  # noqa: ARG002 - one that is cancelled is not open
        return ""

    def cancel_for_its_key(self, row: EvaluationRow) -> None:
        self._store.fail(row, "key_ended", KEY_ENDED)

    def give_up(self, row: EvaluationRow, error: Exception) -> None:
        self._store.fail(row, "server_error", f"it could not be worked on: {error}")
