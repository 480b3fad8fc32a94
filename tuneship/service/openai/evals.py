"""Handlers of evals: the form of rows and the criteria. Their runs: `eval_runs.py`."""

from typing import Any, Literal

from tuneship.contract.openai import evals as contract
from tuneship.contract.openai.evals import (
    EvalCreate,
    EvalDeleted,
    EvalObject,
    EvalObjects,
    EvalUpdate,
    Order,
)
from tuneship.evaluation.json_values import SchemaUnusable, TimedSchema
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_quota
from tuneship.service.evaluations.handlers import delete_evaluation
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.eval_runs import own_eval, settings_of
from tuneship.service.openai.lists import page_behind
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import EVALS
from tuneship.store.database.tables import EvalRow

# A row has this beside its item once a model has answered.
SAMPLE = {"type": "object", "properties": {"output_text": {"type": "string"}}}


@serves_openai(contract.openai_create_eval)
def openai_create_eval(context: Context, eval: EvalCreate) -> EvalObject:  # noqa: A002 - OpenAI's word
    """Check schema and criteria, and record both."""
    try:
        TimedSchema(eval.data_source_config.item_schema)
    except SchemaUnusable as error:
        raise field_error("data_source_config.item_schema", str(error)) from None
    settings_of(eval.testing_criteria)
    most = context.parts.settings.maximum_datasets
    check_quota(context, tables.evals, most, "evals")
    row = rows.insert(
        context.transaction,
        tables.evals,
        {
            "id": new_id("eval"),
            "client_id": context.client_id,
            "created_at": context.now,
            "updated_at": context.now,
            "tags": eval.metadata or {},
            "name": eval.name or "",
            "data_source_config": eval.data_source_config.model_dump(),
            "testing_criteria": [one.model_dump() for one in eval.testing_criteria],
        },
    )
    context.audit_facts.created_id = row["id"]
    context.headers["Location"] = f"/openai/v1/evals/{row['id']}"
    return _shown(row)


@serves_openai(contract.openai_list_evals)
def openai_list_evals(
    context: Context,
    after: str | None = None,
    limit: int = 20,
    order: Order = "asc",
    order_by: Literal["created_at"] = "created_at",  # noqa: ARG001 - the only order
) -> EvalObjects:
    """Return a page of the caller's evals."""
    page, has_more = page_behind(context, EVALS, [], after, limit, is_rising=order == "asc")
    found = [_shown(row) for row in page]
    return EvalObjects.of(found, has_more=has_more)


@serves_openai(contract.openai_get_eval)
def openai_get_eval(context: Context, eval_id: str) -> EvalObject:
    """Return the eval."""
    return _shown(own_eval(context, eval_id))


@serves_openai(contract.openai_update_eval)
def openai_update_eval(context: Context, eval_id: str, update: EvalUpdate) -> EvalObject:
    """Change what was sent."""
    own_eval(context, eval_id)
    sent: dict[str, Any] = {"name": update.name, "tags": update.metadata}
    changes = {name: value for name, value in sent.items() if value is not None}
    rows.change(context.transaction, tables.evals, eval_id, context.now, **changes)
    return _shown(own_eval(context, eval_id))


@serves_openai(contract.openai_delete_eval)
def openai_delete_eval(context: Context, eval_id: str) -> EvalDeleted:
    """Delete the runs with their rows, then the eval."""
    connection, table = context.transaction, tables.evaluations
    own_eval(context, eval_id)
    is_own = table.c.client_id == context.client_id
    for run in rows.matching(connection, table, is_own, table.c.eval_id == eval_id):
        delete_evaluation(context, run["id"])
    rows.remove(connection, tables.evals, eval_id)
    return EvalDeleted(eval_id=eval_id)


def _shown(row: EvalRow) -> EvalObject:
    config = row["data_source_config"]
    parts: dict[str, Any] = {"item": config["item_schema"]}
    if config["include_sample_schema"]:
        parts["sample"] = SAMPLE
    schema = {"type": "object", "properties": parts, "required": [*parts]}
    return EvalObject.model_validate(
        {
            "id": row["id"],
            "name": row["name"],
            "created_at": int(row["created_at"].timestamp()),
            "data_source_config": {"schema": schema},
            "testing_criteria": row["testing_criteria"],
            "metadata": row["tags"] or None,
        }
    )
