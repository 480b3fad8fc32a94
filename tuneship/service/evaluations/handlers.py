"""Handlers of evaluations: they change records and states; `evaluation_run.py` asks the deployments."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from tuneship.contract import evaluations as contract
from tuneship.contract.common import Deleted
from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.errors import (
    DatasetError,
    InvalidRequestError,
    ResourceNotFound,
)
from tuneship.contract.evaluations import (
    OPEN,
    Evaluation,
    EvaluationComparison,
    EvaluationCreate,
    EvaluationPage,
    EvaluationSettings,
    EvaluationStatus,
    EvaluationSummary,
    ExampleScores,
    ExampleScoresPage,
    Outcome,
)
from tuneship.evaluation.graders import GraderRefused, read_graders
from tuneship.evaluation.scoring import Stored
from tuneship.gates.evaluation.evaluation_report import report_of
from tuneship.gates.evaluation.evaluation_tally import UNSCORED, example_of, rules_of, tally_of
from tuneship.gates.evaluation.verdict import RULE_VERSION, judge
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import own_page
from tuneship.service.datasets.lookup import own_dataset, refuse_unsafe
from tuneship.service.datasets.removal import remove_dataset
from tuneship.service.evaluations.evaluation_run import (
    EVALUATION,
    announce_end,
    evaluation_row,
)
from tuneship.service.evaluations.held_out import HeldOutReader
from tuneship.service.evaluations.new_evaluations import (
    answer_tokens,
    record_evaluation,
    serving_deployment,
)
from tuneship.store.database import rows, tables
from tuneship.store.database.listings import EVALUATIONS
from tuneship.store.database.rows import Page
from tuneship.store.database.tables import EvaluationRow
from tuneship.store.records import evaluation_records

# The outcomes of pairs by the names that a grader's report has for their counts.
PAIRS = {"win": "wins", "loss": "losses", "tie": "ties"}
# Two evaluations are comparable if these are the same.
SAME = ("graders", "max_examples", "seed", "max_tokens")


@serves(contract.create_evaluation, is_long=True)
def create_evaluation(context: Context, evaluation: EvaluationCreate) -> Evaluation:
    """Check everything that can be checked now, and record the evaluation; its requests are answered later."""
    sent = evaluation.model_dump(by_alias=True)
    settings = EvaluationSettings.model_validate(
        {name: sent[name] for name in EvaluationSettings.model_fields}
    )
    try:
        written = read_graders(settings.graders)
    except GraderRefused as error:
        raise field_error(error.place, error.message) from None
    dataset = own_dataset(context, evaluation.dataset_id, "dataset_id")
    if dataset["status"] != DatasetStatus.PROCESSED:
        raise DatasetError("the dataset is not processed", param="dataset_id", status=409)
    candidate = serving_deployment(context, evaluation.candidate, "candidate")
    asked, baseline_model = [candidate], None
    earlier: EvaluationRow | None = None
    if evaluation.baseline is not None and evaluation.baseline.startswith(EVALUATION):
        earlier = own_evaluation(context, evaluation.baseline, "baseline")
        baseline_model = earlier["candidate_model"]
    elif evaluation.baseline is not None:
        asked.append(serving_deployment(context, evaluation.baseline, "baseline"))
        baseline_model = asked[-1]["model_name"]
    if written:
        is_sent = "max_tokens" in evaluation.model_fields_set
        tokens = answer_tokens(
            asked, settings.max_tokens if is_sent else None, settings.max_tokens, "max_tokens"
        )
        settings = settings.model_copy(update={"max_tokens": tokens})
    if context.audit_facts.touches_hipaa:
        refuse_unsafe(dataset, "dataset_id")
    # Reads the file: a slice that no line has must not be found out after hours.
    parts = context.parts
    reader = HeldOutReader(parts.database, parts.blobs, parts.keyring, parts.halted)
    _, sha256 = reader.read(dataset, settings)
    if earlier is not None:
        _check_comparable(earlier, settings, sha256, {})

    row = record_evaluation(
        context,
        dataset,
        settings,
        {
            "tags": evaluation.tags,
            "name": evaluation.name,
            "dataset_sha256": sha256,
            "candidate": candidate["id"],
            "baseline": evaluation.baseline,
            "candidate_model": candidate["model_name"],
            "baseline_model": baseline_model,
        },
    )
    return _shown(row)


def _check_comparable(
    earlier: EvaluationRow,
    settings: EvaluationSettings,
    dataset_sha256: str,
    sampling: Mapping[str, Any],
) -> None:
    """Refuse an evaluation of other data, graders, limits or sampling, which is empty where answers are greedy."""
    other = EvaluationSettings.model_validate(earlier["settings"])
    different = [name for name in SAME if getattr(other, name) != getattr(settings, name)]
    if earlier["dataset_sha256"] != dataset_sha256:
        different.insert(0, "dataset_id")
    if _sampling_of(earlier) != sampling:
        different.append("sampling")
    if different:
        text = f"names an evaluation with another {different[0]}"
        raise field_error("baseline", text, "not_comparable")
    if earlier["status"] != EvaluationStatus.COMPLETED or earlier["stopped_early"]:
        text = "names an evaluation that has not scored all its examples"
        raise field_error("baseline", text, "not_comparable")


def _sampling_of(row: EvaluationRow) -> Mapping[str, Any]:
    """How the answers were sampled; empty where they are greedy, as then nothing else matters."""
    sampling: Mapping[str, Any] = (row["eval_run"] or {}).get("sampling", {})
    return sampling if sampling.get("temperature") else {}


def own_evaluation(context: Context, evaluation_id: str, param: str | None = None) -> EvaluationRow:
    """The caller's evaluation. Raises `ResourceNotFound`."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.evaluations, evaluation_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such evaluation", param=param)
    context.touch(row)
    return row


@serves(contract.list_evaluations)
def list_evaluations(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    status: EvaluationStatus | None = None,
    dataset_id: str | None = None,
    tags: dict[str, str] | None = None,
) -> EvaluationPage:
    """Return a page of the caller's evaluations."""
    filters = rows.filters_of(tables.evaluations, tags, status=status, dataset_id=dataset_id)
    page = own_page(context, EVALUATIONS, filters, limit, offset)
    context.touch(*page.rows)
    shown = [EvaluationSummary.model_validate(_fields(row)) for row in page.rows]
    return EvaluationPage(evaluations=shown, pagination=page.pagination)


@serves(contract.get_evaluation)
def get_evaluation(context: Context, evaluation_id: str) -> Evaluation:
    """Return the evaluation with what it has found so far."""
    return _shown(own_evaluation(context, evaluation_id))


@serves(contract.list_evaluation_results)
def list_evaluation_results(
    context: Context,
    evaluation_id: str,
    limit: int = 100,
    offset: int = 0,
    outcome: Outcome | None = None,
) -> ExampleScoresPage:
    """Return the stored scores of one page of examples."""
    row = own_evaluation(context, evaluation_id)
    limit = context.page_size(limit)
    total = row["answered"] if outcome is None else _count(row, outcome)
    count = max(0, min(limit, total - offset))
    found: list[Stored] = []
    if count:
        first, skipped = (offset, 0) if outcome is None else (0, offset)
        with context.read() as connection:
            stored = evaluation_records.results_of(connection, row["id"], first)
            wanted = (one for one in stored if outcome in (None, one["outcome"]))
            found = [*islice(wanted, skipped, skipped + count)]
    page = Page[Stored](found, total, limit, offset)
    results = [ExampleScores.model_validate(one) for one in page.rows]
    return ExampleScoresPage(results=results, pagination=page.pagination)


def _count(row: EvaluationRow, outcome: Outcome) -> int:
    """The number of stored scores of one outcome, which the report has beside them."""
    report, settings = row["report"], EvaluationSettings.model_validate(row["settings"])
    if outcome in (*UNSCORED, "scored"):
        has_pairs = outcome == "scored" and row["baseline"] is not None
        return 0 if has_pairs else report.get("examples", {}).get(outcome, 0)
    first = [one for one in report.get("graders", ()) if one["name"] in settings.deciding[:1]]
    return sum(one.get(PAIRS[outcome], 0) for one in first)


def _results(context: Context, row: EvaluationRow) -> Sequence[Stored]:
    with context.read() as connection:
        return list(evaluation_records.results_of(connection, row["id"]))


@serves(contract.compare_evaluations)
def compare_evaluations(
    context: Context, evaluation_id: str, baseline_id: str
) -> EvaluationComparison:
    """Judge the stored scores of one evaluation's candidate beside those of another's."""
    row, other = (
        own_evaluation(context, evaluation_id),
        own_evaluation(context, baseline_id),
    )
    settings = EvaluationSettings.model_validate(row["settings"])
    _check_comparable(other, settings, row["dataset_sha256"], _sampling_of(row))
    if row["status"] != EvaluationStatus.COMPLETED or row["stopped_early"]:
        raise InvalidRequestError("the evaluation has not scored all its examples", status=409)
    known = {one["line"]: one for one in _results(context, other)}
    tally = tally_of(settings, ())
    for one in _results(context, row):
        beside = known.get(one["line"], one)
        pair: dict[str, Any] = {name: value for name, value in one.items() if name != "baseline"}
        if "candidate" not in beside:
            pair["outcome"] = beside["outcome"]
        else:
            pair["baseline"] = beside["candidate"]
        tally.add(example_of(pair))
    found = judge(tally.counts, rules_of(settings, has_baseline=True))
    report = report_of(tally, found, has_ended=True)
    return EvaluationComparison.model_validate(
        {
            "candidate": row["id"],
            "baseline": other["id"],
            "examples": tally.scored,
            "graders": report["graders"],
            "slices": report["slices"],
            "sentence": report["sentence"],
            "verdict": found.verdict,
            "reason": found.reason,
        }
    )


@serves(contract.cancel_evaluation)
def cancel_evaluation(context: Context, evaluation_id: str) -> Evaluation:
    """End it; its requests in flight are cancelled within a second."""
    connection = context.transaction
    row = own_evaluation(context, evaluation_id)
    if row["status"] == EvaluationStatus.CANCELLED:
        return _shown(row)
    ended = {"status": EvaluationStatus.CANCELLED, "completed_at": context.now}
    if not evaluation_records.move(connection, row["id"], OPEN, context.now, **ended):
        text = f"an evaluation with status {row['status']} cannot be cancelled"
        raise InvalidRequestError(text, status=409)
    changed = evaluation_row(connection, row["id"])
    announce_end(connection, "evaluation.cancelled", changed, context.now)
    return _shown(changed)


@serves(contract.delete_evaluation)
def delete_evaluation(context: Context, evaluation_id: str) -> Deleted:
    """Remove the row and its scores, and the rows of an eval's run, which no other evaluation has."""
    connection = context.transaction
    row = own_evaluation(context, evaluation_id)
    if row["status"] in OPEN:
        raise InvalidRequestError("the evaluation runs: cancel it first", status=409)
    evaluation_records.remove_results(connection, row["id"])
    rows.remove(connection, tables.evaluations, row["id"])
    if row["eval_id"] is not None:
        with suppress(ResourceNotFound):  # it was deleted before
            remove_dataset(context, row["dataset_id"])
    return Deleted(id=row["id"])


def _fields(row: EvaluationRow) -> dict[str, Any]:
    """The row with the fields of its report, as answers have them."""
    examples: dict[str, int] = row["report"].get("examples", {})
    return {**row, "examples": {**examples, "selected": row["selected"] or 0}}


def _shown(row: EvaluationRow) -> Evaluation:
    report = {name: row["report"].get(name) for name in ("graders", "slices", "sentence", "record")}
    fields = {name: value for name, value in report.items() if value is not None}
    return Evaluation.model_validate({**_fields(row), **fields, "rule_version": RULE_VERSION})
