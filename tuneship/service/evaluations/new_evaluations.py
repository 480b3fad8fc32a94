"""Checks what a new evaluation asks, and records it; the keeper of background requests then works on it."""

from collections.abc import Sequence

from tuneship.contract.deployments import GONE
from tuneship.contract.errors import DeploymentError, ResourceNotFound
from tuneship.contract.evaluations import OPEN, EvaluationSettings, EvaluationStatus
from tuneship.service.access.hipaa import HIPAA
from tuneship.service.answers.field_errors import field_error
from tuneship.service.background_requests.answering import kept_caller
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_quota
from tuneship.service.deployments.lookup import own_deployment
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import DeploymentRow, EvaluationRow
from tuneship.store.records import evaluation_records


def serving_deployment(context: Context, deployment_id: str, param: str) -> DeploymentRow:
    """The deployment that a field names. Raises `ResourceNotFound`, and `DeploymentError` where it does not serve."""
    try:
        row = own_deployment(context, deployment_id)
    except ResourceNotFound as error:
        raise ResourceNotFound(error.message, param=param) from None
    if row["status"] in GONE or row["status"] == "failed":
        raise DeploymentError(f"{param} names a deployment that does not serve", param=param)
    return row


def answer_tokens(
    asked: Sequence[DeploymentRow], wanted: int | None, default: int, param: str
) -> int:
    """The longest answer in tokens that each deployment allows. Raises `ValidationFailed` where more is wanted."""
    most: int = min(one["generation"]["max_output_tokens"] for one in asked)
    if wanted is not None and wanted > most:
        raise field_error(param, f"must be at most {most}, the deployment's limit", "out_of_range")
    return wanted or min(most, default)


def record_evaluation(
    context: Context, dataset: Row, settings: EvaluationSettings, values: Row
) -> EvaluationRow:
    """Insert the row of an evaluation of this dataset; `values` names what is asked. Raises `QuotaExceeded`."""
    connection = context.transaction
    most = context.parts.settings.maximum_active_evaluations
    is_open = tables.evaluations.c.status.in_(OPEN)
    check_quota(context, tables.evaluations, most, "evaluations that have not ended", is_open)
    content, facts = values["dataset_sha256"], context.audit_facts
    row = rows.insert(
        connection,
        tables.evaluations,
        {
            "id": new_id("evl"),
            "client_id": context.client_id,
            "created_at": context.now,
            "updated_at": context.now,
            "dataset_id": dataset["id"],
            "settings": settings.model_dump(mode="json", by_alias=True),
            "status": EvaluationStatus.QUEUED,
            # Requests from a file that was not uploaded safely are not private.
            "caller": kept_caller(
                context, is_private=context.caller.is_private and dataset["came_safely"]
            ),
            # Of the deployments, and of the evaluation whose scores are used.
            "security_settings": {
                "audit_logging": facts.is_required,
                "compliance_mode": HIPAA if facts.touches_hipaa else "none",
            },
            "answered": 0,
            "report": {},
            "used_before": evaluation_records.verdicts_on(connection, context.client_id, content),
            "prompt_tokens": 0,
            "completion_tokens": 0,
            **values,
        },
    )
    facts.created_id = row["id"]
    return row
