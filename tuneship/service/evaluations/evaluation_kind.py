"""Evaluations as the keeper of background requests works on them."""

from collections.abc import Sequence

import sqlalchemy as sa

from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.context.context import Parts
from tuneship.service.evaluations.evaluation_run import EvaluationLost, EvaluationRun, end_failed
from tuneship.store.database.tables import EvaluationRow
from tuneship.store.records import evaluation_records

KEY_ENDED = "the API key that made this evaluation was revoked or has expired"


class EvaluationKind:
    """See `BackgroundKind`."""

    name = "evaluation"
    lost: type[Exception] = EvaluationLost

    def __init__(self, parts: Parts) -> None:
        """Keep what an evaluation's run is made of."""
        self._parts = parts

    def open_rows(self, connection: sa.Connection) -> Sequence[EvaluationRow]:
        return evaluation_records.open_evaluations(connection)

    def begin(
        self, row: EvaluationRow, pace: BackgroundPace, threads: Threads, timing: BackgroundTiming
    ) -> EvaluationRun:
        return EvaluationRun(self._parts, row, pace, threads, timing)

    def is_asking(self, row: EvaluationRow) -> bool:  # noqa: ARG002 - each open one does
        return True

    def why_stop(self, row: EvaluationRow) -> str:  # noqa: ARG002 - one that is cancelled is not open
        return ""

    def cancel_for_its_key(self, row: EvaluationRow) -> None:
        end_failed(self._parts, row, "key_ended", KEY_ENDED)

    def give_up(self, row: EvaluationRow, error: Exception) -> None:
        end_failed(self._parts, row, "server_error", f"it could not be worked on: {error}")
