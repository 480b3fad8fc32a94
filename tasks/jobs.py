"""Fine-tuning jobs: create, get, metrics, logs, cancel, and the wait.

The wait is one task with one loop, not a task per poll: six hours would be thousands of nodes. When the flow is stopped
while it waits, it cancels the job at the service: nobody would use the result.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tasks.creates import CREATES, once
from tasks.progress import report
from tuneship.client import ApiError, BadResponse, ServiceUnreachable
from tuneship.contract.jobs import (
    ENDED,
    Job,
    JobCancelled,
    JobCreate,
    JobCreated,
    JobLogEntry,
    JobMetrics,
)

POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 5.0
METRICS_EVERY_POLLS = 5


class JobOverdue(Exception):
    """The job did not end before the deadline of the wait; it has been cancelled."""


@dataclass(frozen=True)
class Patience:
    """How the wait behaves. `stop_early` reads the metrics so far and may say why the job should be cancelled."""

    deadline_seconds: float = 7 * 86400.0
    stop_early: Callable[[JobMetrics], str | None] | None = None


@task(**CREATES, task_run_name="create-job-{job.model_name}")
def create_job(job: JobCreate, run_key: str) -> JobCreated:
    """Queue a fine-tuning job, once for this run."""
    return once(run_key, "create_job", job.model_dump(mode="json")).jobs.create(job)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-{job_id}")
def get_job(job_id: str) -> Job:
    """Fetch a job."""
    return api().jobs.get(job_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="metrics-{job_id}")
def get_job_metrics(job_id: str) -> JobMetrics:
    """Fetch losses and accuracy by step."""
    return api().jobs.metrics(job_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="logs-{job_id}")
def get_job_logs(job_id: str, after: str | None = None) -> list[JobLogEntry]:
    """Fetch the next page of a job's log."""
    return api().jobs.logs(job_id, limit=1000, after=after).logs


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="cancel-{job_id}")
def cancel_job(job_id: str) -> JobCancelled:
    """Stop a job."""
    return api().jobs.cancel(job_id)


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{job_id}")
def wait_for_job(job_id: str, patience: Patience | None = None) -> Job:
    """Wait until the job has ended, whatever its end, and return it; a job that stops early comes back `cancelled`.

    Raises `JobOverdue` past the deadline. Short outages of the service are waited out by the client's retries.
    """
    try:
        return _watch(job_id, patience or Patience())
    except (ApiError, BadResponse, ServiceUnreachable):
        raise
    except (
        BaseException
    ):  # a stopped flow (KeyboardInterrupt, SIGTERM, Prefect's cancel) and JobOverdue
        stop_job(job_id)
        raise


def stop_job(job_id: str) -> None:
    """Cancel a job unless it has ended; for clean-up, so it never raises what would hide the cause."""
    try:
        api().jobs.cancel(job_id)
    except ApiError as error:
        if error.status not in (404, 409):  # gone, or ended
            get_run_logger().warning("job %s could not be cancelled: %s", job_id, error.code)
    except ServiceUnreachable:
        get_run_logger().warning("job %s could not be cancelled: no answer", job_id)


def _watch(job_id: str, patience: Patience) -> Job:
    deadline = time.monotonic() + patience.deadline_seconds
    show = _progress_artifact(job_id)
    status, polls = "", 0
    while True:
        job = api().jobs.get(job_id)
        if job.status != status:
            get_run_logger().info("job %s is %s", job_id, job.status)
            status = job.status
        percent = 100.0 * job.current_step / job.total_steps if job.total_steps else 0.0
        report("training", job.current_step, job.total_steps, _detail(job))
        if job.status in ENDED:
            show(percent)
            return job
        if time.monotonic() > deadline:
            raise JobOverdue(f"job {job_id} is {job.status} after its deadline")
        polls += 1
        if polls % METRICS_EVERY_POLLS == 0:
            show(percent)
            _stop_early(job_id, patience)
        time.sleep(min(LONGEST_POLL_SECONDS, POLL_SECONDS * (1 + polls // 120)))


def _progress_artifact(job_id: str) -> Callable[[float], None]:
    """One artifact on the run's page, updated in place."""
    # Prefect's signature also covers its asynchronous form; in a synchronous task the id comes back at once.
    artifact = cast("UUID", create_progress_artifact(progress=0.0, description=f"job {job_id}"))

    def show(percent: float) -> None:
        update_progress_artifact(artifact, progress=percent)

    return show


def _stop_early(job_id: str, patience: Patience) -> None:
    reason = patience.stop_early(api().jobs.metrics(job_id)) if patience.stop_early else None
    if reason:
        get_run_logger().warning("job %s is cancelled early: %s", job_id, reason)
        stop_job(job_id)


def _detail(job: Job) -> str:
    if job.training_loss is None:
        return job.status
    text = f"epoch {job.current_epoch}/{job.total_epochs}  training loss {job.training_loss:.3f}"
    if job.validation_loss is not None:
        text += f"  validation loss {job.validation_loss:.3f}"
    return text
