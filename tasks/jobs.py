"""Fine-tuning jobs: create them, read them, and wait for their end.

The wait is one task with one loop: a task per poll would be thousands of nodes in six hours. When the flow is stopped
while it waits, it cancels the job, because nobody would use the result.
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

from tasks.api import api
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
from tuneship.prefect.calls import POLL_TRIES

POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 5.0
METRICS_EVERY_POLLS = 5
# For code that also runs outside of a task run, in a state hook.
_LOG = get_logger("tuneship.jobs")


class JobOverdue(Exception):
    """The job did not end before the deadline of the wait; it has been cancelled."""


@dataclass(frozen=True)
class WaitPolicy:
    """Settings of the wait. `stop_early` reads a job's metrics so far and may return a reason to cancel it."""

    deadline_seconds: float = 7 * 86400.0
    stop_early: Callable[[str, JobMetrics], str | None] | None = None
    # Called with the metrics of every job that is still training.
    show: Callable[[Mapping[str, JobMetrics]], None] | None = None


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
    """Wait for jobs that train side by side, as `wait_for_job` does; returned in the given order."""
    return _wait(job_ids, patience or WaitPolicy())


def _wait(job_ids: Sequence[str], patience: WaitPolicy) -> list[Job]:
    try:
        return _watch(job_ids, patience)
    except TuneshipError:
        raise
    # A stopped flow (KeyboardInterrupt, SIGTERM, Prefect's cancel) and JobOverdue.
    except BaseException:
        for job_id in job_ids:
            stop_job(job_id)
        raise


def stop_job(job_id: str) -> None:
    """Cancel a job unless it has ended. It logs failures instead of raising them, which would hide the cause."""
    try:
        api().jobs.cancel(job_id)
    except ApiError as error:
        if error.status not in (404, 409):  # gone, or ended
            _LOG.warning("job %s could not be cancelled: %s", job_id, error.code)
    except ServiceUnreachable:
        _LOG.warning("job %s could not be cancelled: no answer", job_id)


def _watch(job_ids: Sequence[str], patience: WaitPolicy) -> list[Job]:
    deadline = time.monotonic() + patience.deadline_seconds
    show_progress = _progress_artifact(job_ids)
    seen: dict[str, Job] = {}
    polls = 0
    while True:
        for job_id in job_ids:
            if job_id not in seen or seen[job_id].status not in ENDED:
                job = api().with_options(tries=POLL_TRIES).jobs.get(job_id)
                if job_id not in seen or job.status != seen[job_id].status:
                    get_run_logger().info("job %s is %s", job_id, job.status)
                seen[job_id] = job
        percent = _progress(list(seen.values()))
        running = [job_id for job_id, job in seen.items() if job.status not in ENDED]
        if not running:
            show_progress(percent)
            return [seen[job_id] for job_id in job_ids]
        if time.monotonic() > deadline:
            raise JobOverdue(f"not ended after their deadline: {', '.join(running)}")
        polls += 1
        if polls % METRICS_EVERY_POLLS == 0:
            show_progress(percent)
            _look_at_metrics(running, patience)
        time.sleep(min(LONGEST_POLL_SECONDS, POLL_SECONDS * (1 + polls // 120)))


def _progress(jobs: Sequence[Job]) -> float:
    """Percent of all steps that are done; it is also reported to the listeners."""
    # A job that has ended counts only the steps that it made: the others will never come.
    total = sum(job.current_step if job.status in ENDED else job.total_steps for job in jobs)
    done = sum(job.current_step for job in jobs)
    detail = ", ".join(job.status for job in jobs)
    # Losses of several jobs would not fit on one line.
    if len(jobs) == 1 and jobs[0].training_loss is not None:
        [job] = jobs
        detail = (
            f"epoch {job.current_epoch}/{job.total_epochs}  training loss {job.training_loss:.3f}"
        )
        if job.validation_loss is not None:
            detail += f"  validation loss {job.validation_loss:.3f}"
    report("training", done, total, detail)
    return 100.0 * done / total if total else 0.0


def _progress_artifact(job_ids: Sequence[str]) -> Callable[[float], None]:
    """Makes an artifact on the run's page and returns a function that updates it. Its failures are only logged."""
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
