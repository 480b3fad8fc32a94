"""Waits for what the service does after its answer: a dataset is processed, a job or an evaluation ends, a
deployment runs.

A wait is one task with one loop: a task per poll would be thousands of nodes in six hours of training.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_logger

from tuneship.client import ApiError, Client, ServiceUnreachable, TuneshipError
from tuneship.contract.datasets import Dataset, DatasetStatus
from tuneship.contract.deployments import Deployment, DeploymentStatus
from tuneship.contract.evaluations import OPEN as OPEN_EVALUATIONS
from tuneship.contract.evaluations import Evaluation
from tuneship.contract.jobs import ENDED, Job, JobMetrics
from tuneship.prefect.calls import POLL_TRIES
from tuneship.prefect.connection import connected
from tuneship.prefect.credentials import TuneshipCredentials
from tuneship.prefect.progress import report

DATASET_POLL_SECONDS = 1.0
JOB_POLL_SECONDS = 1.0
DEPLOYMENT_POLL_SECONDS = 0.5
LONGEST_POLL_SECONDS = 5.0
METRICS_EVERY_POLLS = 5
NEVER_RUNNING = frozenset(
    {DeploymentStatus.FAILED, DeploymentStatus.DELETING, DeploymentStatus.DELETED}
)
# For code that also runs outside of a task run, in a state hook.
_LOG = get_logger("tuneship.jobs")


class DatasetNotProcessed(Exception):
    """A dataset failed, or was not processed before the deadline."""


class DeploymentNotRunning(Exception):
    """A deployment failed, was deleted, or did not serve before the deadline."""


class EvaluationOverdue(Exception):
    """The evaluation did not end before the deadline of the wait."""


class JobOverdue(Exception):
    """The job did not end before the deadline of the wait."""


@dataclass(frozen=True)
class WaitPolicy:
    """Settings of the wait for jobs."""

    deadline_seconds: float = 7 * 86400.0
    # Whether the jobs are cancelled when the wait ends before they do: at its deadline, or because its flow is stopped.
    cancels: bool = False
    # Reads a job's metrics so far and may return a reason to cancel it.
    stop_early: Callable[[str, JobMetrics], str | None] | None = None
    # Called with the metrics of every job that is still training.
    show: Callable[[Mapping[str, JobMetrics]], None] | None = None


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{dataset_id}")
def wait_for_dataset(
    dataset_id: str,
    deadline_seconds: float = 3600.0,
    credentials: TuneshipCredentials | None = None,
) -> Dataset:
    """Wait until a dataset is processed. Raises `DatasetNotProcessed`, which names no line of it."""
    deadline = time.monotonic() + deadline_seconds
    with connected(credentials) as service:
        while True:
            dataset = service().with_options(tries=POLL_TRIES).datasets.get(dataset_id)
            if dataset.status == DatasetStatus.PROCESSED:
                return dataset
            if dataset.status == DatasetStatus.FAILED or time.monotonic() > deadline:
                raise DatasetNotProcessed(f"dataset {dataset_id} is {dataset.status}")
            time.sleep(DATASET_POLL_SECONDS)


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{deployment_id}")
def wait_for_deployment(
    deployment_id: str,
    deadline_seconds: float = 600.0,
    credentials: TuneshipCredentials | None = None,
) -> Deployment:
    """Wait until a deployment runs. Raises `DeploymentNotRunning` with the service's reason."""
    deadline = time.monotonic() + deadline_seconds
    polls = 0
    with connected(credentials) as service:
        while True:
            deployment = service().with_options(tries=POLL_TRIES).deployments.get(deployment_id)
            status = deployment.status
            if status == DeploymentStatus.RUNNING:
                get_run_logger().info("deployment %s is running", deployment_id)
                return deployment
            if status in NEVER_RUNNING:
                why = deployment.error.message if deployment.error else "no reason given"
                raise DeploymentNotRunning(f"deployment {deployment_id} is {status}: {why}")
            if time.monotonic() > deadline:
                raise DeploymentNotRunning(f"deployment {deployment_id} is still {status}")
            polls += 1
            time.sleep(min(LONGEST_POLL_SECONDS, DEPLOYMENT_POLL_SECONDS * (1 + polls // 20)))


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{evaluation_id}")
def wait_for_evaluation(
    evaluation_id: str,
    deadline_seconds: float = 86400.0,
    credentials: TuneshipCredentials | None = None,
) -> Evaluation:
    """Wait until an evaluation has ended in any state. Raises `EvaluationOverdue` past the deadline."""
    deadline = time.monotonic() + deadline_seconds
    polls = 0
    with connected(credentials) as service:
        while True:
            client = service().with_options(tries=POLL_TRIES)
            evaluation = client.evaluations.get(evaluation_id)
            counts = evaluation.examples
            done = counts.scored + counts.leaked + counts.too_long + counts.failed
            report("evaluation", done, counts.selected)
            if evaluation.status not in OPEN_EVALUATIONS:
                return evaluation
            if time.monotonic() > deadline:
                raise EvaluationOverdue(f"evaluation {evaluation_id} is {evaluation.status}")
            polls += 1
            time.sleep(min(LONGEST_POLL_SECONDS, JOB_POLL_SECONDS * (1 + polls // 60)))


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{job_id}")
def wait_for_job(
    job_id: str,
    patience: WaitPolicy | None = None,
    credentials: TuneshipCredentials | None = None,
) -> Job:
    """Wait until the job has ended in any state, and return it; a job that stops early comes back `cancelled`.

    Raises `JobOverdue` past the deadline. Short outages of the service are waited out by the client's retries.
    """
    return _wait([job_id], patience or WaitPolicy(), credentials)[0]


@task(cache_policy=NO_CACHE, task_run_name="wait-for-jobs")
def wait_for_jobs(
    job_ids: Sequence[str],
    patience: WaitPolicy | None = None,
    credentials: TuneshipCredentials | None = None,
) -> list[Job]:
    """Wait for jobs that train side by side, as `wait_for_job` does; returned in the given order."""
    return _wait(job_ids, patience or WaitPolicy(), credentials)


def _wait(
    job_ids: Sequence[str], patience: WaitPolicy, credentials: TuneshipCredentials | None
) -> list[Job]:
    with connected(credentials) as service:
        try:
            return _watch(service, job_ids, patience)
        except TuneshipError:
            raise
        # A stopped flow (KeyboardInterrupt, SIGTERM, Prefect's cancel) and JobOverdue.
        except BaseException:
            for job_id in job_ids if patience.cancels else ():
                stop_job(service(), job_id)
            raise


def stop_job(client: Client, job_id: str) -> None:
    """Cancel a job unless it has ended. It logs failures instead of raising them, which would hide the cause."""
    try:
        client.jobs.cancel(job_id)
    except ApiError as error:
        if error.status not in (404, 409):  # gone, or ended
            _LOG.warning("job %s could not be cancelled: %s", job_id, error.code)
    except ServiceUnreachable:
        _LOG.warning("job %s could not be cancelled: no answer", job_id)


def _watch(
    service: Callable[[], Client], job_ids: Sequence[str], patience: WaitPolicy
) -> list[Job]:
    deadline = time.monotonic() + patience.deadline_seconds
    show_progress = _progress_artifact(job_ids)
    seen: dict[str, Job] = {}
    polls = 0
    while True:
        for job_id in job_ids:
            if job_id not in seen or seen[job_id].status not in ENDED:
                job = service().with_options(tries=POLL_TRIES).jobs.get(job_id)
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
            _look_at_metrics(service, running, patience)
        time.sleep(min(LONGEST_POLL_SECONDS, JOB_POLL_SECONDS * (1 + polls // 120)))


def _progress(jobs: Sequence[Job]) -> float:
    """Percent of all steps that are done; it is also reported to the listeners."""
    # A job that has ended counts only the steps that it made: the others will never come.
    total = sum(job.current_step if job.status in ENDED else job.total_steps for job in jobs)
    done = sum(job.current_step for job in jobs)
    detail = ", ".join(job.status for job in jobs)
    losses: dict[str, float] = {}
    # Losses of several jobs would not fit on one line.
    if len(jobs) == 1 and (training := jobs[0].training_loss) is not None:
        [job] = jobs
        detail = f"epoch {job.current_epoch}/{job.total_epochs}  training loss {training:.3f}"
        losses["training"] = training
        if job.validation_loss is not None:
            # Measured every now and then: the line is of a later step.
            detail += f"  last validation loss {job.validation_loss:.3f}"
            losses["validation"] = job.validation_loss
    report("training", done, total, detail, **losses)
    return 100.0 * done / total if total else 0.0


def _progress_artifact(job_ids: Sequence[str]) -> Callable[[float], None]:
    """Makes an artifact on the run's page and returns a function that updates it. Its failures are only logged."""
    # Without a run there is no page to write on, and Prefect would start a temporary server for the artifact.
    has_page = TaskRunContext.get() is not None or FlowRunContext.get() is not None
    what = f"training: {', '.join(job_ids)}"
    made: list[UUID] = []

    def show(percent: float) -> None:
        if not has_page:
            return
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


def _look_at_metrics(
    service: Callable[[], Client], job_ids: Sequence[str], patience: WaitPolicy
) -> None:
    if patience.stop_early is None and patience.show is None:
        return
    client = service().with_options(tries=POLL_TRIES)
    known = {job_id: client.jobs.metrics(job_id) for job_id in job_ids}
    if patience.show is not None:
        patience.show(known)
    for job_id, metrics in known.items():
        reason = patience.stop_early(job_id, metrics) if patience.stop_early else None
        if reason:
            get_run_logger().warning("job %s is cancelled early: %s", job_id, reason)
            stop_job(service(), job_id)
