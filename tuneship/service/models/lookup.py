"""Finds base models of the catalogue, and the fine-tuned models of a caller by their rows."""

from collections.abc import Sequence

import sqlalchemy as sa

from tuneship.contract.errors import ModelNotFound
from tuneship.contract.models import Model
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.service.context.context import Context
from tuneship.store.database import rows, tables
from tuneship.store.database.tables import JobRow, ModelRow
from tuneship.store.records import job_records

# Prefix of the id of every fine-tuned model, and of no base model.
TUNED = "ft:"


def tuned_item(catalogue: Catalogue, row: ModelRow) -> Model:
    """A tuned model as the API shows it."""
    base = catalogue.get(row["base_model"])
    if base is not None and base.fault is not None:
        base = None
    return Model(
        id=row["id"],
        name=row["name"],
        version="1",
        description="",
        parameters=base.parameters if base else None,
        context_length=base.context_length if base else None,
        supported_fine_tuning=False,
        base_model=row["base_model"],
        fine_tuning_job_id=row["job_id"],
        created_at=row["created_at"],
        fine_tuning_method=row["fine_tuning_method"],
        ends_learnt=row["ends_learnt"],
        appended_end=row["appended_end"],
        tags=row["tags"],
    )


def own_model(
    context: Context, connection: sa.Connection, identifier: str, param: str = "model_id"
) -> ModelRow:
    """A tuned model of the caller. Raises `ModelNotFound`, for a missing one and for another tenant's alike."""
    row = rows.fetch(connection, tables.models, identifier, client_id=context.client_id)
    if row is None:
        raise ModelNotFound(f"{param} names a model that does not exist", param=param)
    touch_jobs(context, connection, [row])
    return row


def touch_jobs(context: Context, connection: sa.Connection, models: Sequence[ModelRow]) -> None:
    """Apply the security settings of the models' jobs to this request: a tuned model has none of its own."""
    ids = [row["job_id"] for row in models if row["job_id"] is not None]
    context.touch(*job_records.security_settings_by_id(connection, context.client_id, ids))


def model_id(base_model: str, name: str, job_id: str) -> str:
    """`ft:<base>:<name>:<suffix>`; the suffix is the job id without its prefix (§1)."""
    return f"ft:{base_model}:{name}:{job_id.removeprefix('ft_')}"


def base_of(catalogue: Catalogue, identifier: str, param: str) -> CataloguedModel:
    """The base model with this id. Raises `ModelNotFound`, also if its files cannot be used."""
    base = catalogue.get(identifier)
    if base is None:
        known = ", ".join(base.id for base in catalogue)
        raise ModelNotFound(
            f"{param} names a model that does not exist; the base models are {known}", param=param
        )
    if base.fault is not None:
        raise ModelNotFound(
            f"{param} names a base model whose files cannot be used: {base.fault}", param=param
        )
    return base


def job_of(connection: sa.Connection, client_id: str, identifier: str) -> JobRow | None:
    """The job that made a fine-tuned model; None for a base model and an imported one."""
    if not identifier.startswith(TUNED):
        return None
    model = rows.fetch(connection, tables.models, identifier, client_id=client_id)
    if model is None or model["job_id"] is None:
        return None
    return rows.fetch(connection, tables.jobs, model["job_id"], client_id=client_id)
