"""Fine-tuning jobs: create, get, metrics, logs, cancel, and the wait.

The wait is one task with one loop, not a task per poll: six hours would be thousands of nodes. When the flow is stopped
while it waits, it cancels the job at the service: nobody would use the result.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_logger

from tasks.api import POLL_TRIES, api
from tasks.create_once import CREATES, as_created, made_before, marks, once
from tasks.factory import task_of
from tasks.progress import report
from tuneship.client import ApiError, ServiceUnreachable, TuneshipError
from tuneship.contract import jobs
from tuneship.contract.jobs import (
    ENDED,
    Job,
    JobCreate,
    JobCreated,
    JobMetrics,
)

POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 5.0
METRICS_EVERY_POLLS = 5
# For what also happens outside a run, in a state hook.
_LOG = get_logger("tuneship.jobs")


class JobOverdue(Exception):
    """The job did not end before the deadline of the wait; it has been cancelled."""


@dataclass(frozen=True)
class WaitPolicy:
    """How the wait behaves. `stop_early` reads a job's metrics so far and may say why it should be cancelled."""

    deadline_seconds: float = 7 * 86400.0
    stop_early: Callable[[str, JobMetrics], str | None] | None = None
    show: Callable[[Mapping[str, JobMetrics]], None] | None = None
    """Is told the metrics of every job that still trains."""


@task(**CREATES, task_run_name="create-job-{job.model_name}")
def create_job(job: JobCreate, run_key: str) -> JobCreated:
    """Queue a fine-tuning job, once for this run; one that it queued before is found by its tags."""
    create = (run_key, "create_job", job.model_dump(mode="json", exclude_defaults=True))
    tags = marks(*create)
    for made in made_before(api().jobs.iterate(limit=100, tags=tags), tags):
        return as_created(JobCreated, api().jobs.get(made.id))
    return once(*create).jobs.create(job.model_copy(update={"tags": {**job.tags, **tags}}))


get_job = task_of(jobs.get_job)


get_job_metrics = task_of(jobs.get_job_metrics)


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{job_id}")
def wait_for_job(job_id: str, patience: WaitPolicy | None = None) -> Job:
    """Wait until the job has ended, whatever its end, and return it; a job that stops early comes back `cancelled`.

    Raises `JobOverdue` past the deadline. Short outages of the service are waited out by the client's retries.
    """
    return _wait([job_id], patience or WaitPolicy())[0]


@task(cache_policy=NO_CACHE, task_run_name="wait-for-jobs")
def wait_for_jobs(job_ids: Sequence[str], patience: WaitPolicy | None = None) -> list[Job]:
    """The same for jobs that train side by side; in the order in which they are given."""
    return _wait(job_ids, patience or WaitPolicy())


def _wait(job_ids: Sequence[str], patience: WaitPolicy) -> list[Job]:
    try:
        return _watch(job_ids, patience)
    except TuneshipError:
        raise
    except (
        BaseException
    ):  # a stopped flow (KeyboardInterrupt, SIGTERM, Prefect's cancel) and JobOverdue
        for job_id in job_ids:
            stop_job(job_id)
        raise


def stop_job(job_id: str) -> None:
    """Cancel a job unless it has ended; for clean-up, so it never raises what would hide the cause."""
    try:
        api().jobs.cancel(job_id)
    except ApiError as error:
        if error.status not in (404, 409):  # gone, or ended
            _LOG.warning("job %s could not be cancelled: %s", job_id, error.code)
    except ServiceUnreachable:
        _LOG.warning("job %s could not be cancelled: no answer", job_id)


def _watch(job_ids: Sequence[str], patience: WaitPolicy) -> list[Job]:
    deadline = time.monotonic() + patience.deadline_seconds
    show = _progress_artifact(job_ids)
    seen: dict[str, Job] = {}
    polls = 0
    while True:
        for job_id in job_ids:
            if job_id not in seen or seen[job_id].status not in ENDED:
                seen[job_id] = _poll(job_id, seen.get(job_id))
        percent = _progress(list(seen.values()))
        running = [job_id for job_id, job in seen.items() if job.status not in ENDED]
        if not running:
            show(percent)
            return [seen[job_id] for job_id in job_ids]
        if time.monotonic() > deadline:
            raise JobOverdue(f"not ended after their deadline: {', '.join(running)}")
        polls += 1
        if polls % METRICS_EVERY_POLLS == 0:
            show(percent)
            _look_at_metrics(running, patience)
        time.sleep(min(LONGEST_POLL_SECONDS, POLL_SECONDS * (1 + polls // 120)))


def _poll(job_id: str, before: Job | None) -> Job:
    job = api().with_options(tries=POLL_TRIES).jobs.get(job_id)
    if before is None or job.status != before.status:
        get_run_logger().info("job %s is %s", job_id, job.status)
    return job


def _progress(jobs: Sequence[Job]) -> float:
    """Percent of all steps; tells whoever listens, too. A job that has ended has no steps left."""
    total = sum(job.current_step if job.status in ENDED else job.total_steps for job in jobs)
    done = sum(job.current_step for job in jobs)
    detail = _detail(jobs[0]) if len(jobs) == 1 else ", ".join(job.status for job in jobs)
    report("training", done, total, detail)
    return 100.0 * done / total if total else 0.0


def _progress_artifact(job_ids: Sequence[str]) -> Callable[[float], None]:
    """One artifact on the run's page, updated in place; one that cannot be written never stops a training."""
    what = f"training: {', '.join(job_ids)}"
    made: list[UUID] = []

    def show(percent: float) -> None:
        try:
            if made:
                update_progress_artifact(made[0], progress=percent)
            else:
                # Prefect's signature also covers its asynchronous form; in a synchronous task the id comes at once.
                artifact = create_progress_artifact(progress=percent, description=what)
                made.append(cast("UUID", artifact))
        except Exception as error:  # noqa: BLE001 - the Prefect server may be away; the training matters more
            _LOG.warning("the progress was not written (%s)", type(error).__name__)

    show(0.0)
    return show


def _look_at_metrics(job_ids: Sequence[str], patience: WaitPolicy) -> None:
    if patience.stop_early is None and patience.show is None:
        return
    client = api().with_options(tries=POLL_TRIES)
    known = {job_id: client.jobs.metrics(job_id) for job_id in job_ids}
    if patience.show is not None:
        patience.show(known)
    for job_id, metrics in known.items():
        reason = patience.stop_early(job_id, metrics) if patience.stop_early else None
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
