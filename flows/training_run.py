"""One fine-tuning job of a release: create it once, watch it, cancel it when it diverges, judge what came out.

The limits and the judgement stand in `tuneship/gates/training.py`.
"""

from prefect import get_run_logger

from flows.champion import Champion, validation_content
from flows.parameters import ReleaseParameters
from flows.release_run import ReleaseRun, described
from flows.training_data import Prepared
from tasks.jobs import Patience, create_job, get_job_metrics, wait_for_job
from tuneship.contract.jobs import Job, JobMetrics
from tuneship.gates.training import (
    FinishedJob,
    TrainingVerdict,
    Watch,
    judge_training,
    watch_training,
)

SLACK_SECONDS = 3600.0
"""How long beyond its own limit a job may queue before the wait gives up."""


class EarlyStop:
    """The live gates between two polls."""

    def __init__(self, warmup_steps: int) -> None:
        """Nothing has been seen."""
        self._watch = Watch()
        self._warmup_steps = warmup_steps

    def __call__(self, metrics: JobMetrics) -> str | None:
        """Why the job should be cancelled, if at all."""
        told = metrics.model_dump()
        self._watch, gate = watch_training(self._watch, told, self._warmup_steps)
        return f"{gate.name}: {gate.note}" if gate else None


def train(release: ReleaseParameters, data: Prepared, run: ReleaseRun) -> tuple[Job, JobMetrics]:
    """The job of this release once it has ended, with its metrics."""
    job_id = run.job_on(data.content)
    if job_id is None:
        wanted = release.job(data.dataset_id, data.validation_dataset_id, run.tags)
        job_id = create_job(wanted, run.key).id
        run.remember("job", job_id, content=list(data.content))
    deadline = 3600.0 * release.compute_config.max_runtime_hours + SLACK_SECONDS
    job = wait_for_job(job_id, Patience(deadline, EarlyStop(release.hyperparameters.warmup_steps)))
    metrics = get_job_metrics(job_id)
    run.trained(job, metrics)
    if job.error is not None:
        get_run_logger().error("job %s failed: %s: %s", job_id, job.error.reason, job.error.message)
    return job, metrics


def judge(
    release: ReleaseParameters,
    data: Prepared,
    job: Job,
    metrics: JobMetrics,
    champion: Champion | None,
) -> TrainingVerdict:
    """Gates T0 to T9; one log line for each that does not simply pass."""
    finished = FinishedJob(
        status=job.status,
        fine_tuned_model=job.fine_tuned_model,
        base_model=job.base_model,
        total_steps=job.total_steps,
        validation_dataset_id=job.validation_dataset_id,
        content_sha256=validation_content(job),
        validation_examples=data.validation_examples,
        duplicates=data.duplicates,
    )
    measured = champion.measured if champion else None
    verdict = judge_training(finished, metrics.model_dump(), measured, release.training_gates)
    for one in verdict.gates:
        if one.state in ("reject", "hold", "warn"):
            get_run_logger().warning("gate %s: %s, %s", one.name, one.state, described(one))
    get_run_logger().info("training gates: %s", verdict.decision)
    return verdict
