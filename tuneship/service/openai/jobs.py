"""Handlers of fine-tuning jobs: they translate to and from the jobs of the main API."""

from typing import Any, NoReturn

from pydantic import ValidationError

from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.errors import InvalidRequestError
from tuneship.contract.jobs import JobCreate, JobStatus
from tuneship.contract.openai import jobs as contract
from tuneship.contract.openai.ids import own_id, result_file_of, shown_id
from tuneship.contract.openai.jobs import (
    CheckpointMetrics,
    FineTuningJob,
    FineTuningJobCheckpoint,
    FineTuningJobCheckpoints,
    FineTuningJobCreate,
    FineTuningJobEvents,
    FineTuningJobs,
    JobFailure,
    ShownHyperparameters,
    ShownMethod,
    ShownOptions,
)
from tuneship.service.answers.field_errors import error_from_pydantic, with_names
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.context.context import Context
from tuneship.service.datasets.lookup import own_dataset
from tuneship.service.jobs import handlers as jobs
from tuneship.service.jobs.lookup import own_job
from tuneship.service.jobs.record_progress import forecast_end
from tuneship.service.models.hyperparameters import usual_rate
from tuneship.service.models.lookup import TUNED, base_of
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.errors import INVALID, OpenAIError
from tuneship.service.openai.job_events import events_of, place_of
from tuneship.service.openai.lists import page_behind
from tuneship.store.database import rows, tables
from tuneship.store.database.listings import JOBS
from tuneship.store.database.tables import JobRow
from tuneship.store.records import job_records

# The name of the model where the client gave none: OpenAI leaves it empty, and a model here has one.
UNNAMED = "tuned"
HYPERPARAMETERS, MULTIPLIER = "hyperparameters", "learning_rate_multiplier"
# OpenAI's names of the main API's fields.
NAMES = {
    "base_model": "model",
    "dataset_id": "training_file",
    "validation_dataset_id": "validation_file",
    "model_name": "suffix",
    "tags": "metadata",
    "hyperparameters.epochs": "hyperparameters.n_epochs",
    "hyperparameters.seed": "seed",
}
STATES = {
    JobStatus.QUEUED: "queued",
    JobStatus.RUNNING: "running",
    JobStatus.COMPLETED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLING: "cancelled",
    JobStatus.CANCELLED: "cancelled",
}
# OpenAI's code and field for the reason why a job failed; any other reason is its own code.
FAILURES = {"data_unreadable": ("invalid_training_file", "training_file")}
# The digits of a multiplier that a division of two rates brings back exactly.
DIGITS = 10


@serves_openai(contract.openai_create_job)
def openai_create_job(context: Context, job: FineTuningJobCreate) -> FineTuningJob:
    """Queue the job with the settings that stand for OpenAI's."""
    files = {"training_file": job.training_file, "validation_file": job.validation_file}
    for name, dataset_id in files.items():
        status = None if dataset_id is None else own_dataset(context, dataset_id, name)["status"]
        # Some clients wait for a file that is still being checked, by this status and code.
        if status == DatasetStatus.PROCESSING:
            text = f"{name} is not ready: it is still being checked"
            raise OpenAIError(text, 400, (INVALID, "file_not_ready"), param=name)
        if status == DatasetStatus.FAILED:
            text = f"{name} was refused when it was checked: see its status_details"
            raise OpenAIError(text, 422, (INVALID, "invalid_training_file"), param=name)

    names = NAMES
    if job.chosen.learning_rate is None:
        names = NAMES | {f"{HYPERPARAMETERS}.learning_rate": f"{HYPERPARAMETERS}.{MULTIPLIER}"}
    with with_names(names):
        made = jobs.create_job(context, _job_of(context.parts.catalogue, job))
    context.audit_facts.created_id = made.id
    context.headers["Location"] = f"/v1/fine-tuning/jobs/{made.id}"
    return _shown(context, own_job(context, made.id, context.transaction))


def _job_of(catalogue: Catalogue, job: FineTuningJobCreate) -> JobCreate:
    """The job as the main API takes it. Raises the contract's errors."""
    chosen = job.chosen
    own = chosen.model_dump(exclude_none=True)
    multiplier = own.pop(MULTIPLIER, "auto")
    hyperparameters: dict[str, Any] = {"epochs": own.pop("n_epochs"), **own}
    hyperparameters.setdefault("learning_rate", "auto")
    if multiplier != "auto" and not job.model.startswith(TUNED):
        base = base_of(catalogue, job.model, "base_model")
        hyperparameters["learning_rate"] = multiplier * usual_rate(base.parameters)
    if job.seed is not None:
        hyperparameters["seed"] = job.seed
    try:
        return JobCreate.model_validate(
            {
                "base_model": job.model,
                "dataset_id": job.training_file,
                "validation_dataset_id": job.validation_file,
                "model_name": job.suffix or UNNAMED,
                "hyperparameters": hyperparameters,
                "tags": job.metadata or {},
            }
        )
    except ValidationError as error:
        raise error_from_pydantic(error) from None


@serves_openai(contract.openai_list_jobs)
def openai_list_jobs(
    context: Context,
    after: str | None = None,
    limit: int = 20,
    metadata: dict[str, str] | None = None,
) -> FineTuningJobs:
    """Return a page of the caller's jobs."""
    filters = rows.filters_of(tables.jobs, metadata)
    place = None if after is None else own_id(after)
    page, has_more = page_behind(context, JOBS, filters, place, limit)
    context.touch(*page)
    return FineTuningJobs(data=[_shown(context, row) for row in page], has_more=has_more)


@serves_openai(contract.openai_get_job)
def openai_get_job(context: Context, job_id: str) -> FineTuningJob:
    """Return the job."""
    return _shown(context, _own(context, job_id))


@serves_openai(contract.openai_cancel_job)
def openai_cancel_job(context: Context, job_id: str) -> FineTuningJob:
    """Cancel the job as the main API does."""
    jobs.cancel_job(context, job_id)
    return _shown(context, own_job(context, job_id, context.transaction))


def _refuse_pausing() -> NoReturn:
    text = "jobs cannot be paused here: cancel the job, or let it continue"
    raise OpenAIError(text, 400, (INVALID, "unsupported_operation"))


@serves_openai(contract.openai_pause_job)
def openai_pause_job(context: Context, job_id: str) -> FineTuningJob:
    """Refuse by name: an unknown address would look like a job that is gone."""
    _own(context, job_id)
    _refuse_pausing()


@serves_openai(contract.openai_resume_job)
def openai_resume_job(context: Context, job_id: str) -> FineTuningJob:
    """Refuse by name: an unknown address would look like a job that is gone."""
    _own(context, job_id)
    _refuse_pausing()


@serves_openai(contract.openai_list_job_events)
def openai_list_job_events(
    context: Context, job_id: str, after: str | None = None, limit: int = 20
) -> FineTuningJobEvents:
    """Return the events before the one with the id `after`, newest first."""
    before = None
    if after is not None and (before := place_of(after)) is None:
        raise InvalidRequestError("after names an entry that does not exist", param="after")
    with context.read() as connection:
        job = own_job(context, job_id, connection)
        newest = None if before is None else before[0]
        logs = job_records.logs_before(connection, job_id, before=newest, limit=limit + 2)
        steps = job_records.steps_before(connection, job_id, before=before, limit=limit + 1)
    moments = {entry["id"]: int(entry["timestamp"].timestamp()) for entry in logs}
    found = events_of(job, logs, steps, moments)
    events = [event for place, event in found if before is None or place < before]
    return FineTuningJobEvents(data=events[:limit], has_more=len(events) > limit)


@serves_openai(contract.openai_list_job_checkpoints)
def openai_list_job_checkpoints(
    context: Context,
    job_id: str,
    after: str | None = None,
    limit: int = 10,  # noqa: ARG001 - there is one at most
) -> FineTuningJobCheckpoints:
    """Return the state that the model holds."""
    with context.read() as connection:
        job = own_job(context, job_id, connection)
        best = job_records.best_step(connection, job_id)
    model = job["fine_tuned_model"]
    if model is None or best is None or after is not None:
        return FineTuningJobCheckpoints(data=[])
    identifier = f"{shown_id(job_id, 'ftckpt')}-{best['step']}"
    metrics = CheckpointMetrics(
        step=best["step"],
        train_loss=best["training_loss"],
        valid_loss=best["validation_loss"],
        valid_mean_token_accuracy=best["accuracy"],
    )
    checkpoint = FineTuningJobCheckpoint(
        id=identifier,
        created_at=int((job["completed_at"] or job["updated_at"]).timestamp()),
        fine_tuning_job_id=shown_id(job_id),
        fine_tuned_model_checkpoint=f"{model}:ckpt-step-{best['step']}",
        step_number=best["step"],
        metrics=metrics,
    )
    return FineTuningJobCheckpoints(data=[checkpoint], first_id=identifier, last_id=identifier)


def _own(context: Context, job_id: str) -> JobRow:
    with context.read() as connection:
        return own_job(context, job_id, connection)


def _shown(context: Context, row: JobRow) -> FineTuningJob:
    status = JobStatus(row["status"])
    has_ended = STATES[status] in ("succeeded", "failed", "cancelled")
    finished = row["completed_at"] or row["updated_at"]
    end = forecast_end(row, context.now)
    validation = row["validation_dataset_id"]
    shown = _shown_hyperparameters(context.parts.catalogue, row)
    failure: JobFailure | None = None
    if row["error"] is not None:
        reason, message = row["error"]["reason"], row["error"]["message"]
        code, param = FAILURES.get(reason, (reason, None))
        failure = JobFailure(code=code, message=message, param=param)
    return FineTuningJob.model_validate(
        {
            "id": shown_id(row["id"]),
            "created_at": int(row["created_at"].timestamp()),
            "finished_at": int(finished.timestamp()) if has_ended else None,
            "model": row["base_model"],
            "fine_tuned_model": row["fine_tuned_model"],
            "organization_id": row["client_id"],
            "status": STATES[status],
            "training_file": shown_id(row["dataset_id"]),
            "validation_file": None if validation is None else shown_id(validation),
            "result_files": [result_file_of(row["id"])] if row["fine_tuned_model"] else [],
            "hyperparameters": shown,
            "method": ShownMethod(supervised=ShownOptions(hyperparameters=shown)),
            "seed": row["hyperparameters"]["seed"],
            "metadata": row["tags"] or None,
            "error": failure,
            "estimated_finish": None if end is None else int(end.timestamp()),
            "user_provided_suffix": None if row["model_name"] == UNNAMED else row["model_name"],
        }
    )


def _shown_hyperparameters(catalogue: Catalogue, row: JobRow) -> ShownHyperparameters:
    """The settings in force; the rate as a multiple of what `auto` chooses, 1 where the base model is gone."""
    chosen, base = row["hyperparameters"], catalogue.get(row["base_model"])
    multiplier = 1.0
    if base is not None and base.fault is None:
        multiplier = float(f"{chosen['learning_rate'] / usual_rate(base.parameters):.{DIGITS}g}")
    return ShownHyperparameters(
        n_epochs=chosen["epochs"],
        batch_size=chosen["batch_size"],
        learning_rate_multiplier=multiplier,
    )
