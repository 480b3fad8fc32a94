"""What the job operations do: check what a job refers to, queue it, show it, cancel it. `supervisor.py` runs it."""

import math
from typing import Any

import sqlalchemy as sa

from tuneship.contract import jobs as contract
from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.errors import (
    DatasetError,
    InstanceTypeUnavailable,
    InvalidRequestError,
    QuotaExceeded,
    ResourceNotFound,
)
from tuneship.contract.jobs import (
    ENDED,
    MOVES,
    Job,
    JobCancelled,
    JobCreate,
    JobCreated,
    JobLogEntry,
    JobLogs,
    JobMetrics,
    JobStatus,
    LogCursor,
)
from tuneship.service.catalogue import BaseModel
from tuneship.service.context import Context
from tuneship.service.datasets import own_dataset
from tuneship.service.instances import check_instance_type, require_instance_type
from tuneship.service.models import base_of
from tuneship.service.refusals import refused
from tuneship.service.safeguards import refuse_what_is_not_enforced
from tuneship.service.serving_table import serves
from tuneship.store import job_records, rows, tables
from tuneship.store.events import emit
from tuneship.store.identifiers import new_id
from tuneship.store.rows import Row

SMALLEST_DATASET = 2


@serves(contract.create_job)
def create_job(context: Context, job: JobCreate) -> JobCreated:
    """Refuse what cannot work, then queue it together with its event."""
    refuse_what_is_not_enforced(job.security_settings)
    check_instance_type(job.compute_config.instance_type, "compute_config.instance_type")
    if job.base_model.startswith("ft:"):
        raise refused("base_model", "must be a base model: tuning a tuned model is not available")
    base = base_of(context.parts, job.base_model, "base_model")
    _check_modules(base, job.hyperparameters.target_modules)
    dataset = _usable(context, job.dataset_id, "dataset_id")
    if job.validation_dataset_id is not None:
        validation = _usable(context, job.validation_dataset_id, "validation_dataset_id")
        if validation["format"] != dataset["format"]:
            raise DatasetError(
                "the two datasets have different formats", param="validation_dataset_id"
            )
    steps = math.ceil(dataset["num_examples"] / job.hyperparameters.batch_size)
    if job.hyperparameters.warmup_steps > steps * job.hyperparameters.epochs:
        raise refused("hyperparameters.warmup_steps", "must not exceed the job's steps")
    if job.compute_config.instance_count > 1:
        raise InstanceTypeUnavailable(
            "this installation trains on one instance", param="compute_config.instance_count"
        )
    require_instance_type(job.compute_config.instance_type, "compute_config.instance_type")
    row = _row(context, job)
    _check_quota(context)
    stored = rows.insert(context.transaction, tables.jobs, row)
    emit(context.transaction, "fine_tuning.job.queued", row, context.now, status=row["status"])
    job_records.add_log(context.transaction, row["id"], context.now, "info", "job queued")
    return JobCreated(**stored)


def _check_modules(base: BaseModel, modules: list[str]) -> None:
    if modules == ["all-linear"] or set(modules) <= base.linear_modules:
        return
    known = ", ".join(sorted(base.linear_modules))
    raise refused("hyperparameters.target_modules", f"must be all-linear or some of: {known}")


def _usable(context: Context, dataset_id: str, param: str) -> Row:
    row = own_dataset(context, dataset_id, param)
    if row["status"] != DatasetStatus.PROCESSED:
        raise DatasetError("the dataset is not processed", param=param, status=409)
    if param == "dataset_id" and row["num_examples"] < SMALLEST_DATASET:
        raise DatasetError(f"a job needs at least {SMALLEST_DATASET} examples", param=param)
    return row


def _row(context: Context, job: JobCreate) -> dict[str, Any]:
    hyperparameters = job.hyperparameters.model_dump()
    if hyperparameters["lora_alpha"] is None:
        hyperparameters["lora_alpha"] = 2 * hyperparameters["lora_rank"]
    return {
        "id": new_id("ft"),
        "client_id": context.client_id,
        "created_at": context.now,
        "updated_at": context.now,
        "base_model": job.base_model,
        "dataset_id": job.dataset_id,
        "validation_dataset_id": job.validation_dataset_id,
        "fine_tuning_method": job.fine_tuning_method,
        "model_name": job.model_name,
        "status": JobStatus.QUEUED,
        "hyperparameters": hyperparameters,
        "validation_frequency": job.validation_frequency,
        "compute_config": job.compute_config.model_dump(),
        "security_settings": job.security_settings.model_dump(),
        "tags": job.tags,
        "total_epochs": job.hyperparameters.epochs,
    }


def _check_quota(context: Context) -> None:
    limit, table = context.parts.settings.maximum_active_jobs, tables.jobs
    active = rows.count(
        context.transaction,
        table,
        table.c.client_id == context.client_id,
        table.c.status.not_in(ENDED),
    )
    if active >= limit:
        raise QuotaExceeded(f"this client has {limit} active jobs, the most it may have")


def _own(context: Context, job_id: str, connection: sa.Connection) -> Row:
    row = rows.fetch(connection, tables.jobs, job_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such job")
    return row


@serves(contract.get_job)
def get_job(context: Context, job_id: str) -> Job:
    """The record as it stands."""
    with context.read() as connection:
        return Job(**_own(context, job_id, connection))


@serves(contract.cancel_job)
def cancel_job(context: Context, job_id: str) -> JobCancelled:
    """Mark it; the supervisor ends the processes and then says `cancelled`."""
    connection = context.transaction
    row = _own(context, job_id, connection)
    status, moment = JobStatus(row["status"]), row["updated_at"]
    if status is not JobStatus.CANCELLING:
        if JobStatus.CANCELLING not in MOVES[status]:
            raise InvalidRequestError(f"the job has ended: it is {status}", status=409)
        status, moment = JobStatus.CANCELLING, context.now
        rows.change(connection, tables.jobs, job_id, moment, status=status)
        job_records.add_log(connection, job_id, moment, "info", "cancellation asked for")
    return JobCancelled(id=job_id, status=status, updated_at=moment)


@serves(contract.get_job_metrics)
def get_job_metrics(context: Context, job_id: str) -> JobMetrics:
    """One entry a step, in rising order."""
    with context.read() as connection:
        row = _own(context, job_id, connection)
        steps = job_records.metrics_of(connection, job_id)
    names = ("training_loss", "validation_loss", "learning_rate", "accuracy", "perplexity")
    return JobMetrics(
        job_id=job_id,
        steps=[step["step"] for step in steps],
        epochs=[step["epoch"] for step in steps],
        created_at=row["created_at"],
        **{name: [step[name] for step in steps] for name in names},
    )


@serves(contract.get_job_logs)
def get_job_logs(
    context: Context,
    job_id: str,
    limit: int = 100,
    after: str | None = None,
    stream: bool = False,
) -> JobLogs:
    """Oldest first, behind `after`."""
    if stream:
        raise refused("stream", "is not available yet: poll with after")
    cursors = context.parts.cursors
    with context.read() as connection:
        _own(context, job_id, connection)
        position = 0 if after is None else cursors.position(job_id, after)
        entries = job_records.logs_of(connection, job_id, after=position, limit=limit)
    last = cursors.issue(job_id, entries[-1]["id"]) if entries else after
    return JobLogs(
        logs=[JobLogEntry(**entry) for entry in entries], pagination=LogCursor(after=last)
    )
