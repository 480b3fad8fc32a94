"""Handlers of the runs of evals: evaluations of one deployment without a baseline, on rows that become a dataset."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

from pydantic import ValidationError

from tuneship.contract.errors import InvalidRequestError, ResourceNotFound
from tuneship.contract.evaluations import EvaluationSettings, EvaluationStatus
from tuneship.contract.openai import eval_runs as contract
from tuneship.contract.openai.eval_runs import (
    MAXIMUM_ANSWER_TOKENS,
    EvalRun,
    EvalRunCreate,
    EvalRunDeleted,
    EvalRuns,
    ItemOutcome,
    OutputItem,
    OutputItems,
    RunDataSource,
    RunStatus,
)
from tuneship.contract.openai.evals import EvalCriterion, Order, graders_of
from tuneship.contract.openai.ids import shown_id
from tuneship.evaluation.scoring import Stored
from tuneship.service.answers.field_errors import error_from_pydantic, with_names
from tuneship.service.context.context import Context
from tuneship.service.evaluations import handlers as evaluations
from tuneship.service.evaluations.new_evaluations import (
    answer_tokens,
    record_evaluation,
    serving_deployment,
)
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.eval_rows import store_rows
from tuneship.service.openai.files import NOT_IN_A_NAME
from tuneship.service.openai.lists import page_behind
from tuneship.service.openai.model_lookup import lasting_deployment
from tuneship.store.database import rows, tables
from tuneship.store.database.listings import EVALUATIONS
from tuneship.store.database.tables import EvalRow, EvaluationRow
from tuneship.store.records import evaluation_records

STATES: dict[EvaluationStatus, RunStatus] = {
    EvaluationStatus.QUEUED: "queued",
    EvaluationStatus.RUNNING: "in_progress",
    EvaluationStatus.COMPLETED: "completed",
    EvaluationStatus.FAILED: "failed",
    EvaluationStatus.CANCELLED: "canceled",
}
# Graders that an evaluation may be decided by; a run has no verdict, and so all others are only scored.
MAXIMUM_GATING = 4
# Why a row has no score.
UNSCORED = {
    "failed": "no answer came",
    "leaked": "the model was trained on this row",
    "too_long": "the model refuses the prompt, which may be too long",
}


def own_eval(context: Context, eval_id: str) -> EvalRow:
    """The caller's eval. Raises `ResourceNotFound`."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.evals, eval_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such eval")
    return row


def settings_of(criteria: Sequence[EvalCriterion], max_tokens: int = 1) -> EvaluationSettings:
    """The settings of a run of one row. Raises `ValidationFailed`."""
    graders = graders_of(criteria)
    try:
        return EvaluationSettings.model_validate(
            {
                "graders": graders,
                "gating": [one["name"] for one in graders][:MAXIMUM_GATING],
                "max_examples": 1,
                "max_tokens": max_tokens,
                "stop_early": False,
            }
        )
    except ValidationError as error:
        with with_names({"graders": "testing_criteria"}):
            raise error_from_pydantic(error) from None


@serves_openai(contract.openai_create_eval_run, is_long=True)
def openai_create_eval_run(context: Context, eval_id: str, run: EvalRunCreate) -> EvalRun:
    """Make a dataset of the rows and record an evaluation of it; the requests are answered later."""
    asked, source = own_eval(context, eval_id), run.data_source
    with with_names({"model": "data_source.model"}):
        deployment_id = lasting_deployment(context, source.model)
        deployment = serving_deployment(context, deployment_id, "model")
    sampling = source.sampling_params
    max_tokens = answer_tokens(
        [deployment],
        sampling.max_completion_tokens,
        MAXIMUM_ANSWER_TOKENS,
        "data_source.sampling_params.max_completion_tokens",
    )
    criteria = [EvalCriterion.model_validate(one) for one in asked["testing_criteria"]]
    settings = settings_of(criteria, max_tokens)
    stored = store_rows(context, asked, run, settings.graders)
    # It may have been deleted while the rows were read; from here on the transaction keeps it.
    asked = own_eval(context, eval_id)
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    name = run.name or asked["name"]
    row = record_evaluation(
        context,
        stored.dataset,
        settings.model_copy(update={"max_examples": stored.count}),
        {
            "tags": run.metadata or {},
            "name": NOT_IN_A_NAME.sub("_", name).lstrip("._- ")[:128] or asked["id"],
            "dataset_sha256": stored.sha256,
            "candidate": deployment["id"],
            "candidate_model": deployment["model_name"],
            "eval_id": asked["id"],
            "eval_run": {
                "name": name,
                "data_source": _without_texts(source),
                "sampling": {one: value for one, value in chosen.items() if value is not None},
            },
        },
    )
    context.headers["Location"] = f"/openai/v1/evals/{eval_id}/runs/{row['id']}"
    return _shown(asked, row)


def _without_texts(source: RunDataSource) -> dict[str, Any]:
    """The data source as a run shows it: rows and prompt are in the dataset alone."""
    rows_from = source.source
    shown: dict[str, Any] = {"type": rows_from.type}
    shown |= {"content": []} if rows_from.id is None else {"id": shown_id(rows_from.id)}
    return {
        "type": source.type,
        "model": source.model,
        "source": shown,
        "sampling_params": source.sampling_params.model_dump(exclude_none=True),
    }


def _own_run(context: Context, eval_id: str, run_id: str) -> EvaluationRow:
    try:
        row = evaluations.own_evaluation(context, run_id)
    except ResourceNotFound:
        row = None
    if row is None or row["eval_id"] != eval_id:
        raise ResourceNotFound("there is no such run")
    context.audit_facts.path_id = row["id"]
    return row


@serves_openai(contract.openai_list_eval_runs)
def openai_list_eval_runs(
    context: Context,
    eval_id: str,
    after: str | None = None,
    limit: int = 20,
    order: Order = "asc",
    status: RunStatus | None = None,
) -> EvalRuns:
    """Return a page of the eval's runs."""
    asked = own_eval(context, eval_id)
    filters = [tables.evaluations.c.eval_id == eval_id]
    if status is not None:
        own = next(one for one, shown in STATES.items() if shown == status)
        filters.append(tables.evaluations.c.status == own)
    page, has_more = page_behind(
        context, EVALUATIONS, filters, after, limit, is_rising=order == "asc"
    )
    context.touch(*page)
    found = [_shown(asked, row) for row in page]
    return EvalRuns.of(found, has_more=has_more)


@serves_openai(contract.openai_get_eval_run)
def openai_get_eval_run(context: Context, eval_id: str, run_id: str) -> EvalRun:
    """Return the run with the counts of what is stored so far."""
    row = _own_run(context, eval_id, run_id)
    return _shown(own_eval(context, eval_id), row)


@serves_openai(contract.openai_cancel_eval_run)
def openai_cancel_eval_run(context: Context, eval_id: str, run_id: str) -> EvalRun:
    """Cancel the evaluation as the main API does."""
    _own_run(context, eval_id, run_id)
    evaluations.cancel_evaluation(context, run_id)
    return openai_get_eval_run(context, eval_id, run_id)


@serves_openai(contract.openai_delete_eval_run)
def openai_delete_eval_run(context: Context, eval_id: str, run_id: str) -> EvalRunDeleted:
    """Delete the evaluation and its dataset as the main API does."""
    _own_run(context, eval_id, run_id)
    evaluations.delete_evaluation(context, run_id)
    return EvalRunDeleted(run_id=run_id)


@serves_openai(contract.openai_list_output_items)
def openai_list_output_items(  # noqa: PLR0913 - the list's own parameters
    context: Context,
    eval_id: str,
    run_id: str,
    after: str | None = None,
    limit: int = 20,
    order: Order = "asc",
    status: ItemOutcome | None = None,
) -> OutputItems:
    """Return a page of scores; they are read from the page's beginning to its end."""
    row, asked = _own_run(context, eval_id, run_id), own_eval(context, eval_id)
    is_rising = order == "asc"
    first = 0 if is_rising else row["answered"] - 1
    if after is not None:
        last = _position(row, after)
        if last is None:
            raise InvalidRequestError("after names an entry that does not exist", param="after")
        first = last + (1 if is_rising else -1)
    with context.read() as connection:
        items = (
            _item(asked, row, position, one)
            for position, one in evaluation_records.numbered_results(
                connection, row["id"], first, is_rising=is_rising
            )
        )
        wanted = (item for item in items if status in (None, item.status))
        found = list(islice(wanted, limit + 1))
    page = found[:limit]
    return OutputItems.of(page, has_more=len(found) > limit)


@serves_openai(contract.openai_get_output_item)
def openai_get_output_item(
    context: Context, eval_id: str, run_id: str, output_item_id: str
) -> OutputItem:
    """Return the scores of one row."""
    row, asked = _own_run(context, eval_id, run_id), own_eval(context, eval_id)
    position = _position(row, output_item_id)
    if position is None:
        raise ResourceNotFound("there is no such output item")
    with context.read() as connection:
        one = next(evaluation_records.results_of(connection, row["id"], position))
    return _item(asked, row, position, one)


def _item_id(row: EvaluationRow, position: int) -> str:
    return f"outputitem_{row['id'].partition('_')[2]}-{position}"


def _position(row: EvaluationRow, item_id: str) -> int | None:
    """The place of a row's scores among those of its run; None for an id that none of them has."""
    number = item_id.rpartition("-")[2]
    position = int(number) if number.isdecimal() and len(number) < 10 else -1
    is_there = position < row["answered"] and item_id == _item_id(row, position)
    return position if is_there else None


def _item(asked: EvalRow, row: EvaluationRow, position: int, one: Stored) -> OutputItem:
    scores: dict[str, float] | None = one.get("candidate")
    names = [grader["name"] for grader in row["settings"]["graders"]]
    results: list[dict[str, Any]] = [
        {
            "name": criterion["name"],
            "type": criterion["type"],
            "passed": scores[name] == 1.0,
            "score": scores[name],
        }
        for name, criterion in zip(names, asked["testing_criteria"], strict=True)
        if scores is not None
    ]
    status: Literal["pass", "fail", "error"] = "error"
    if scores is not None:
        status = "pass" if all(result["passed"] for result in results) else "fail"
    outcome: str = one["outcome"]
    sampling: dict[str, Any] = (row["eval_run"] or {}).get("sampling", {})
    return OutputItem.model_validate(
        {
            "id": _item_id(row, position),
            "eval_id": asked["id"],
            "run_id": row["id"],
            "created_at": int(row["created_at"].timestamp()),
            "status": status,
            "datasource_item_id": one["line"] - 1,
            "results": results,
            "sample": {
                "model": row["candidate_model"],
                "temperature": sampling["temperature"],
                "top_p": sampling.get("top_p"),
                "seed": sampling.get("seed"),
                "max_completion_tokens": row["settings"]["max_tokens"],
                "error": {"code": outcome, "message": UNSCORED[outcome]}
                if outcome in UNSCORED
                else None,
            },
        }
    )


def _shown(asked: EvalRow, row: EvaluationRow) -> EvalRun:
    """The run, with the counts of the scores that are stored."""
    graders = [one["name"] for one in row["settings"]["graders"]]
    # The report is stored together with the scores.
    counts = Counter[str](row["report"].get("examples", {}))
    passed: dict[str, Any] = row["report"].get("passed", {"all": 0, "graders": {}})
    scored, right = counts["scored"], passed["all"]
    errored = sum(counts[why] for why in UNSCORED)
    kept: dict[str, Any] = row["eval_run"] or {}
    return EvalRun.model_validate(
        {
            "id": row["id"],
            "eval_id": asked["id"],
            "name": kept["name"],
            "status": STATES[EvaluationStatus(row["status"])],
            "model": kept["data_source"]["model"],
            "created_at": int(row["created_at"].timestamp()),
            "report_url": f"/v1/evaluations/{row['id']}",
            "data_source": kept["data_source"],
            "result_counts": {
                "total": scored + errored,
                "passed": right,
                "failed": scored - right,
                "errored": errored,
            },
            "per_model_usage": [
                {
                    "model_name": row["candidate_model"],
                    "invocation_count": scored + errored - counts["leaked"],
                    "prompt_tokens": row["prompt_tokens"],
                    "completion_tokens": row["completion_tokens"],
                    "total_tokens": row["prompt_tokens"] + row["completion_tokens"],
                }
            ],
            "per_testing_criteria_results": [
                {
                    "testing_criteria": one["name"],
                    "passed": passed["graders"].get(name, 0),
                    "failed": scored - passed["graders"].get(name, 0),
                }
                for name, one in zip(graders, asked["testing_criteria"], strict=True)
            ],
            "error": row["error"],
            "metadata": row["tags"] or None,
        }
    )
