"""Handlers of jobs: check what a job refers to, queue it, show it, cancel it. `training_keeper.py` runs it.

The meaning of "auto" is in `models/hyperparameters.py`, the stream of a job in `stream.py`.
"""

from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from tuneship.contract import jobs as contract
from tuneship.contract.common import render_time
from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.errors import DatasetError, InstanceTypeUnavailable, InvalidRequestError
from tuneship.contract.jobs import (
    ALIVE,
    MOVES,
    Job,
    JobCancelled,
    JobCreate,
    JobCreated,
    JobPage,
    JobStatus,
    JobSummary,
)
from tuneship.contract.reports.job_reports import JobLogEntry, JobLogs
from tuneship.service.access.hipaa import HIPAA
from tuneship.service.answers.field_errors import field_error
from tuneship.service.answers.streaming import Stream
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import log_page, own_page
from tuneship.service.context.quotas import check_quota
from tuneship.service.datasets.advice import SMALLEST_DATASET
from tuneship.service.datasets.lookup import own_dataset, refuse_unsafe
from tuneship.service.jobs.attempts import SEALED_KINDS
from tuneship.service.jobs.lookup import own_job
from tuneship.service.jobs.record_progress import forecast_end
from tuneship.service.jobs.stream import StreamPosition, job_frames, position_of
from tuneship.service.models import hyperparameters
from tuneship.service.models.instances import require_training_type
from tuneship.service.models.lookup import TUNED, base_of, own_model
from tuneship.service.models.safeguards import in_force
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import JOBS
from tuneship.store.database.tables import DatasetRow, JobLogRow
from tuneship.store.records import job_queue, job_records
from tuneship.store.records.outbox import emit


@serves(contract.create_job)
def create_job(context: Context, job: JobCreate) -> JobCreated:
    """Refuse what cannot work, then queue it together with its event."""
    safeguards = in_force(context, job.security_settings)
    job = job.model_copy(update={"security_settings": safeguards})
    if job.base_model.startswith(TUNED):
        raise field_error(
            "base_model", "must be a base model: tuning a tuned model is not available"
        )
    base = base_of(context.parts.catalogue, job.base_model, "base_model")
    if base.tuning_fault is not None:
        raise field_error("base_model", f"names a model that cannot be tuned: {base.tuning_fault}")
    modules = job.hyperparameters.target_modules
    if modules != ["all-linear"] and not set(modules) <= base.linear_modules:
        known = ", ".join(sorted(base.linear_modules))
        raise field_error(
            "hyperparameters.target_modules", f"must be all-linear or some of: {known}"
        )
    largest_rank = base.engine.largest_rank(base.runtime_options)
    if largest_rank is not None and job.hyperparameters.lora_rank > largest_rank:
        rule = f"{base.engine.name} {base.engine.rank_rule(largest_rank)}"
        text = f"must be at most {largest_rank}: {rule}"
        raise field_error("hyperparameters.lora_rank", text, code="out_of_range")
    parameters = base.parameters  # read from files, so before the transaction

    # The transaction begins before the datasets are read: none of them may be deleted from here on.
    connection = context.transaction
    chosen = hyperparameters.resolved(
        job.hyperparameters,
        examples=_training_examples(context, job),
        has_validation_set=job.validation_dataset_id is not None,
        parameters=parameters,
    )
    compared = job.comparison.model if job.comparison else None
    if compared is not None:
        if not compared.startswith(TUNED):
            text = "must be a tuned model: the base model is measured anyway"
            raise field_error("comparison.model", text)
        model = own_model(context, connection, compared, "comparison.model")
        if model["base_model"] != job.base_model:
            raise field_error("comparison.model", "must be a model that was tuned from base_model")
    if job.compute_config.instance_count > 1:
        text = "this installation trains on one instance"
        raise InstanceTypeUnavailable(text, param="compute_config.instance_count")
    instance_type = job.compute_config.instance_type
    require_training_type(context, instance_type, "compute_config.instance_type")

    most, is_active = context.parts.settings.maximum_active_jobs, tables.jobs.c.status.in_(ALIVE)
    check_quota(context, tables.jobs, most, "active jobs", is_active)
    stored = rows.insert(connection, tables.jobs, _new_row(context, job, chosen))
    for kind in SEALED_KINDS:
        name = f"{kind}/{stored['id']}"
        context.parts.keyring.make(connection, context.client_id, name, context.now)
    emit(connection, "fine_tuning.job.queued", stored, context.now)
    job_records.add_log(connection, stored["id"], context.now, "info", "job queued")
    return JobCreated.model_validate(stored)


def _training_examples(context: Context, job: JobCreate) -> int:
    """Check both datasets and return the number of lines to train on."""
    dataset = _usable(context, job, job.dataset_id, "dataset_id")
    if job.validation_dataset_id is not None:
        validation = _usable(context, job, job.validation_dataset_id, "validation_dataset_id")
        if validation["format"] != dataset["format"]:
            raise DatasetError(
                "the two datasets have different formats", param="validation_dataset_id"
            )
    return dataset["num_examples"]


def _usable(context: Context, job: JobCreate, dataset_id: str, param: str) -> DatasetRow:
    row = own_dataset(context, dataset_id, param)
    if row["status"] != DatasetStatus.PROCESSED:
        raise DatasetError("the dataset is not processed", param=param, status=409)
    if job.security_settings.compliance_mode == HIPAA:
        refuse_unsafe(row, param)
    if param == "dataset_id" and row["num_examples"] < SMALLEST_DATASET:
        raise DatasetError(f"a job needs at least {SMALLEST_DATASET} examples", param=param)
    return row


def _new_row(context: Context, job: JobCreate, chosen: dict[str, Any]) -> dict[str, Any]:
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
        "hyperparameters": chosen,
        "validation_frequency": job.validation_frequency,
        "compute_config": job.compute_config.model_dump(),
        "security_settings": job.security_settings.model_dump(),
        "comparison": job.comparison.model_dump() if job.comparison else None,
        "tags": job.tags,
        "total_epochs": chosen["epochs"],
    }


@serves(contract.get_job)
def get_job(context: Context, job_id: str) -> Job:
    """Return the job with its place in the queue, or its forecast end."""
    with context.read() as connection:
        row = own_job(context, job_id, connection)
        queue_position = None
        if row["status"] == JobStatus.QUEUED:
            queue_position = job_queue.queue_order(connection, context.now).index(job_id) + 1
    end = forecast_end(row, context.now)
    found = {**row, "queue_position": queue_position, "estimated_completion_at": end}
    return Job.model_validate(found)


@serves(contract.list_jobs)
def list_jobs(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    status: JobStatus | None = None,
    base_model: str | None = None,
    tags: dict[str, str] | None = None,
) -> JobPage:
    """Return a page of the caller's jobs, newest first."""
    filters = rows.filters_of(tables.jobs, tags, status=status, base_model=base_model)
    page = own_page(context, JOBS, filters, limit, offset, lambda _, jobs: context.touch(*jobs))
    jobs = [JobSummary.model_validate(row) for row in page.rows]
    return JobPage(jobs=jobs, pagination=page.pagination)


@serves(contract.cancel_job)
def cancel_job(context: Context, job_id: str) -> JobCancelled:
    """Mark the job; the keeper ends its processes and then makes it `cancelled`."""
    connection = context.transaction
    row = own_job(context, job_id, connection)
    status, moment = JobStatus(row["status"]), row["updated_at"]
    if status is not JobStatus.CANCELLING:
        if JobStatus.CANCELLING not in MOVES[status]:
            raise InvalidRequestError(f"the job has ended: it is {status}", status=409)
        status, moment = JobStatus.CANCELLING, context.now
        rows.change(connection, tables.jobs, job_id, moment, status=status)
        job_records.add_log(connection, job_id, moment, "info", "cancellation requested")
    return JobCancelled(id=job_id, status=status, updated_at=moment)


@serves(contract.get_job_metrics)
def get_job_metrics(context: Context, job_id: str, evaluated_only: bool = False) -> bytes:
    """Return one entry per step, in rising order; rendered from columns, since there may be thousands."""
    with context.read() as connection:
        row = own_job(context, job_id, connection)
        curve = job_records.curve_of(connection, job_id, evaluated_only=evaluated_only)
        # They are only about the model that the job has made.
        is_completed = row["status"] == JobStatus.COMPLETED
        losses = job_records.row_losses_of(connection, job_id) if is_completed else None
    names = ("steps", "epochs", *(str(column.name) for column in job_records.SHOWN[2:]))
    columns = zip(*curve.rows, strict=True) if curve.rows else ((),) * len(names)
    answer: dict[str, Any] = {
        "job_id": job_id,
        **dict(zip(names, columns, strict=True)),
        "created_at": render_time(row["created_at"]),
    }
    if curve.is_thinned:
        answer["thinned"] = True
    if losses is not None:
        answer["row_losses"] = losses
    return orjson.dumps(answer)


@serves(contract.get_job_logs)
def get_job_logs(
    context: Context,
    job_id: str,
    limit: int = 100,
    after: str | None = None,
    stream: bool = False,
) -> JobLogs | Stream:
    """Return log entries after the cursor, oldest first; a stream resumes after the last frame that was received."""
    if stream:
        position = position_of(context, job_id, context.last_event_id or after)
        with context.read() as connection:
            own_job(context, job_id, connection)
        return Stream(job_frames(context, job_id, position))

    def read(connection: sa.Connection, number: int) -> Sequence[JobLogRow]:
        own_job(context, job_id, connection)
        # A cursor of a stream is good for pages too: they continue behind its last log entry.
        log_id = StreamPosition.of(number).log_id
        return job_records.logs_of(connection, job_id, after=log_id, limit=limit)

    page, cursor = log_page(context, job_id, after, read, lambda entry: entry["id"])
    return JobLogs(logs=[JobLogEntry.model_validate(entry) for entry in page], pagination=cursor)
