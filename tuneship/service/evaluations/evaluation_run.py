"""One evaluation, from its dataset to its verdict. A restarted service begins it again from its row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.evaluations import (
    OPEN,
    EvaluationSettings,
    EvaluationStatus,
)
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.scoring import (
    Asked,
    DeploymentGone,
    HeldOutExample,
    Scoring,
    Stored,
    unscored,
)
from tuneship.gates.evaluation.evaluation_report import report_of
from tuneship.gates.evaluation.evaluation_tally import example_of, rules_of, tally_of
from tuneship.gates.evaluation.verdict import (
    LOOK_EXAMPLES,
    EvaluationResult,
    judge,
    look,
    record_of,
)
from tuneship.host.thread_pools import Threads
from tuneship.service.background_requests.answering import BackgroundAnswer, BackgroundRequest
from tuneship.service.background_requests.background_run import BackgroundRun
from tuneship.service.evaluations.example_requests import (
    ExampleRequest,
    LikelihoodRequest,
    answer_in,
)
from tuneship.service.evaluations.held_out import HeldOutReader
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import EvaluationRow
from tuneship.store.records import evaluation_records
from tuneship.store.records.outbox import emit

EVALUATION = "evl_"
# The event of a run of one of OpenAI's evals, by that of the evaluation.
_OF_RUNS = {
    "evaluation.completed": "eval.run.succeeded",
    "evaluation.failed": "eval.run.failed",
    "evaluation.cancelled": "eval.run.canceled",
}


class EvaluationLost(Exception):
    """Somebody else has changed the evaluation: whoever worked on it stops and looks at its row again."""


@dataclass(eq=False)
class _InputGone(Exception):
    """The dataset or the stored scores of an evaluation were deleted."""

    code: str
    why: str


class _Decided(Exception):
    """The evidence suffices before the last example."""


class EvaluationRun:
    """The work on one evaluation."""

    def __init__(
        self,
        store: "EvaluationStore",
        reader: HeldOutReader,
        row: EvaluationRow,
        requests: BackgroundRun,
        threads: Threads,
    ) -> None:
        """`row` as it was just read."""
        self._records = store
        self._reader = reader
        self.requests = requests
        self._row = row
        self._threads = threads
        self._settings = EvaluationSettings.model_validate(row["settings"])
        baseline = row["baseline"]
        # The deployments that are asked each example, one after the other.
        self._asked = [row["candidate"]]
        if baseline is not None and not baseline.startswith(EVALUATION):
            self._asked.append(baseline)
        # Answers are greedy, but for a run of one of OpenAI's evals that says otherwise.
        sampling: dict[str, Any] = (row["eval_run"] or {}).get("sampling", {})
        self._options = {"temperature": 0.0, "max_tokens": self._settings.max_tokens, **sampling}
        self._rules = rules_of(self._settings, has_baseline=baseline is not None)
        self._scoring = Scoring(self._settings)
        self._examples: Sequence[HeldOutExample] = ()
        # Scores of an earlier evaluation that stands for the baseline, by line.
        self._known: dict[int, Stored] = {}
        self._leaked = frozenset[int]()
        # Answers to examples of which not all deployments have answered.
        self._pending: list[BackgroundAnswer] = []

    async def run(self) -> None:
        """Work until the evaluation has ended. Raises `EvaluationLost`, `OSError` and SQLAlchemy's errors."""
        try:
            await self._threads.run(self._prepare)
            # After a kill between the last look and the end, the evidence suffices already.
            if not self._row["stopped_early"]:
                await self.requests.run(self._requests(), self._store)
                await self._threads.run(self._store_rest)
        except _Decided:
            pass
        except DeploymentGone as gone:
            await self._threads.run(self._records.fail, self._row, "deployment_gone", gone.code)
            return
        except _InputGone as gone:
            await self._threads.run(self._records.fail, self._row, gone.code, gone.why)
            return
        await self._threads.run(self._finish)

    def _prepare(self) -> None:
        """Read the examples, and find those that leaked, once."""
        row = self._row
        with self._records.database.read() as connection:
            dataset = rows.fetch(
                connection, tables.datasets, row["dataset_id"], client_id=row["client_id"]
            )
            baseline = row["baseline"]
            if baseline is not None and baseline.startswith(EVALUATION):
                stored = evaluation_records.results_of(connection, baseline)
                self._known = {one["line"]: one for one in stored}
                if not self._known:
                    why = "the evaluation that stands for the baseline was deleted"
                    raise _InputGone("baseline_gone", why)
            self._tally = tally_of(
                self._settings, evaluation_records.results_of(connection, row["id"])
            )
        if dataset is None:
            # While the request that made the evaluation still read it; from then on that is refused.
            raise _InputGone("dataset_gone", "the dataset was deleted")
        self._examples, _ = self._reader.read(dataset, self._settings)
        if row["leaked_lines"] is None:
            models = [name for name in (row["candidate_model"], row["baseline_model"]) if name]
            found, is_complete = self._reader.leaks(
                row["client_id"], models, self._examples, lambda: bool(self.requests.why_not)
            )
            self._change(
                OPEN,
                status=EvaluationStatus.RUNNING,
                started_at=self._records.clock(),
                selected=len(self._examples),
                leaked_lines=found,
                leaks_checked=is_complete,
            )
        self._leaked = frozenset(self._row["leaked_lines"] or ())

    def _requests(self) -> Iterator[BackgroundRequest]:
        """The requests for the examples behind the stored ones; both models get an example before the next begins."""
        for example in self._examples[self._row["answered"] :]:
            if self._unscored_before(example) is None:
                for deployment_id in self._asked:
                    for asked in self._scoring.asked(example):
                        yield self._request(deployment_id, example.item, asked)

    def _request(self, deployment_id: str, item: EvaluationItem, asked: Asked) -> BackgroundRequest:
        if asked is None:
            return ExampleRequest(deployment_id, item, self._options)
        return LikelihoodRequest(deployment_id, item, asked)

    def _unscored_before(self, example: HeldOutExample) -> Stored | None:
        """The finished row of an example that is skipped; None where deployments must answer it."""
        if example.line in self._leaked:
            return unscored(example, "leaked")
        known = self._known.get(example.line)
        if self._row["baseline"] in (None, *self._asked) or (known and "candidate" in known):
            return None
        return unscored(example, "failed" if known is None else known["outcome"])

    def _store(self, answers: Sequence[BackgroundAnswer]) -> None:
        """Score and store the examples that have all their answers now; end where the evidence suffices."""
        waiting = [*self._pending, *answers]
        results: list[Stored] = []
        used, is_decided = 0, False
        for example in self._examples[self._row["answered"] :]:
            made = self._unscored_before(example)
            if made is None:
                asked = self._scoring.asked(example)
                mine = waiting[used : used + len(self._asked) * len(asked)]
                if len(mine) < len(self._asked) * len(asked):
                    break
                used += len(mine)
                given = iter([answer_in(one.content) for one in mine])
                models = [dict(zip(asked, given, strict=False)) for _ in self._asked]
                known = self._known.get(example.line)
                made = self._scoring.score(
                    example,
                    models[0],
                    models[1] if len(models) > 1 else None,
                    known and known["candidate"],
                )
            results.append(made)
            self._tally.add(example_of(made))
            is_look = self._tally.scored and self._tally.scored % LOOK_EXAMPLES == 0
            is_decided = bool(is_look) and look(self._tally.counts, self._rules) is not None
            if is_decided:
                break
        self._pending = waiting[used:]
        self._keep(results, waiting[:used], is_decided=is_decided)
        if is_decided:
            raise _Decided

    def _store_rest(self) -> None:
        """Store the examples at the end that no deployment was asked."""
        if self._row["answered"] < len(self._examples):
            self._store([])

    def _keep(
        self, results: Sequence[Stored], answers: Sequence[BackgroundAnswer], *, is_decided: bool
    ) -> None:
        """Store scores with the numbers of the evaluation, in one transaction."""
        row, now = self._row, self._records.clock()
        found = judge(self._tally.counts, self._rules)
        with self._records.database.write(row["client_id"]) as connection:
            is_stored = evaluation_records.advance(
                connection,
                row,
                results,
                now,
                report=report_of(self._tally, found, has_ended=False),
                stopped_early=is_decided,
                prompt_tokens=row["prompt_tokens"] + sum(one.prompt_tokens for one in answers),
                completion_tokens=row["completion_tokens"]
                + sum(one.completion_tokens for one in answers),
            )
            if not is_stored:
                raise EvaluationLost(row["id"])
            self._row = evaluation_row(connection, row["id"])

    def _finish(self) -> None:
        """Decide, and end the evaluation with an event."""
        counts = self._tally.counts
        found: EvaluationResult | None = None
        if self._row["stopped_early"]:
            found = look(counts, self._rules)
        found = found or judge(counts, self._rules)
        report = report_of(self._tally, found, has_ended=True) | {"record": record_of(found)}
        self._change(
            [EvaluationStatus.RUNNING],
            status=EvaluationStatus.COMPLETED,
            completed_at=self._records.clock(),
            report=report,
            verdict=found.verdict,
            reason=found.reason,
            emits="evaluation.completed",
        )

    def _change(
        self, before: Sequence[EvaluationStatus], emits: str | None = None, **values: Any
    ) -> None:
        self._row = self._records.change(self._row, before, emits, **values)


@dataclass(frozen=True)
class EvaluationStore:
    """Changes the rows of evaluations. Called from threads."""

    database: Database
    clock: Callable[[], datetime]

    def change(
        self,
        row: EvaluationRow,
        before: Sequence[EvaluationStatus],
        emits: str | None,
        **values: Any,
    ) -> EvaluationRow:
        """Change one that is in one of these states, with an event if one is named. Raises `EvaluationLost`."""
        now = self.clock()
        with self.database.write(row["client_id"]) as connection:
            if not evaluation_records.move(connection, row["id"], before, now, **values):
                raise EvaluationLost(row["id"])
            changed = evaluation_row(connection, row["id"])
            if emits is not None:
                announce_end(connection, emits, changed, now)
            return changed

    def fail(self, row: EvaluationRow, code: str, why: str) -> None:
        """End one that cannot go on. Raises `EvaluationLost`."""
        self.change(
            row,
            OPEN,
            "evaluation.failed",
            status=EvaluationStatus.FAILED,
            completed_at=self.clock(),
            error={"code": code, "message": why},
        )


def announce_end(connection: sa.Connection, kind: str, row: EvaluationRow, now: datetime) -> None:
    """Emit the event that an evaluation has ended: its verdict, and no text. A run of an eval also has OpenAI's."""
    data = {
        "reason": row["reason"] or (row["error"] or {}).get("code"),
        "verdict": row["verdict"],
        "scored": row["report"]["examples"]["scored"] if row["report"] else 0,
    }
    emit(connection, kind, row, now, **data)
    if row["eval_id"] is not None:
        emit(connection, _OF_RUNS[kind], row, now, **data)


def evaluation_row(connection: sa.Connection, evaluation_id: str) -> EvaluationRow:
    """The row of an evaluation. Raises `EvaluationLost` where it was deleted."""
    row = rows.fetch(connection, tables.evaluations, evaluation_id, client_id=None)
    if row is None:
        raise EvaluationLost(evaluation_id)
    return row
