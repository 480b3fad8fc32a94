"""The fine-tuning of a release: create each job once, watch them, cancel one that diverges, judge the result.

Several sets of hyperparameters train side by side, as far as the service's queue lets them; the best by validation loss
is released. Limits and gates: `tuneship/gates/training/training_gates.py`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

from prefect import get_run_logger

from flows.forms.release_form import ReleaseParameters
from flows.release.champion import Champion, validation_content
from flows.release.data import Prepared
from flows.release.loss_limits import Limit
from flows.release.release_run import ReleaseRun, described
from flows.release.reports.training_page import TrainingPage
from flows.release.result import Contender
from tasks.datasets import get_dataset
from tasks.jobs import create_job, get_job, get_job_metrics
from tuneship.client import ApiError
from tuneship.contract.jobs import Comparison, Job, JobCreate, JobMetrics, JobStatus
from tuneship.gates.training.divergence import DivergenceWatch, watch_training
from tuneship.gates.training.training_gates import (
    MIN_POINTS,
    FinishedJob,
    TrainingVerdict,
    lowest_loss,
)
from tuneship.gates.training.training_record import TrainingRecord
from tuneship.prefect.waits import WaitPolicy, wait_for_job, wait_for_jobs

# How long beyond its own limit a job may queue before the wait gives up.
SLACK_SECONDS = 3600.0


class EarlyStop:
    """Watches running jobs from poll to poll for divergence."""

    def __init__(self, warmup_steps: Mapping[str, int]) -> None:
        """Watch these jobs, given each one's number of warm-up steps."""
        self._watches = {job_id: DivergenceWatch() for job_id in warmup_steps}
        self._warmup_steps = warmup_steps

    def __call__(self, job_id: str, metrics: JobMetrics) -> str | None:
        """Say why the job should be cancelled; None if it should go on."""
        watch, warmup_steps = self._watches[job_id], self._warmup_steps[job_id]
        self._watches[job_id], gate = watch_training(watch, metrics.model_dump(), warmup_steps)
        return f"{gate.name}: {gate.note}" if gate else None


def train(
    release: ReleaseParameters, data: Prepared, run: ReleaseRun, champion: Champion | None
) -> tuple[Job, JobMetrics]:
    """Train all jobs to their end. Returns the one that is released, with its metrics."""
    ids: list[str] = []
    _warn_of_few_points(release, data)
    comparison = _comparison(release, run.key, champion)
    for settings in release.settings:
        name = settings.model_dump_json(exclude_defaults=True)
        # A run that goes on after a crash has created some of them before.
        job_id = run.find_job(data.content, name)
        if job_id is None:
            wanted = release.job(data.dataset_id, data.validation_dataset_id, settings, comparison)
            job_id = _create(wanted, run.key)
            run.remember(
                "job",
                job_id,
                dataset_id=data.dataset_id,
                content=list(data.content),
                settings=name,
            )
        ids.append(job_id)

    made = [get_job(job_id) for job_id in ids]
    # The limit to the champion is not known before both are measured on the rows that judge.
    most = release.training_gates.max_validation_loss
    limits = [Limit("T9 first model", most)] if most is not None and champion is None else []
    # The jobs may have to queue for each other.
    hours = release.compute_config.max_runtime_hours * len(made)
    patience = WaitPolicy(
        deadline_seconds=3600.0 * hours + SLACK_SECONDS,
        # Nobody would use the result of a release that has stopped.
        cancels=True,
        stop_early=EarlyStop({job.id: _warmup_steps(job) for job in made}),
        show=TrainingPage(limits).show,
    )
    ended = [wait_for_job(ids[0], patience)] if len(ids) == 1 else wait_for_jobs(ids, patience)
    measured = [get_job_metrics(job.id) for job in ended]
    place = best_of(ended, measured)
    contenders = _contenders(ended, measured, place) if len(ended) > 1 else []
    job, metrics = ended[place], measured[place]
    run.set_job(job, contenders)
    for one in ended:
        if one.error is not None:
            get_run_logger().error(
                "job %s failed: %s: %s", one.id, one.error.reason, one.error.message
            )
    if contenders:
        get_run_logger().info("of %d jobs %s is released", len(contenders), job.id)
    return job, metrics


def _comparison(release: ReleaseParameters, run_key: str, champion: Champion | None) -> Comparison:
    """Ask for losses by row, of the champion too; each release draws other rows that judge."""
    seed = int.from_bytes(hashlib.sha256(run_key.encode()).digest()[:4]) >> 1
    measured = champion.measured if champion else None
    is_comparable = measured is not None and measured.base_model == release.base_model
    return Comparison(model=measured.model if measured and is_comparable else None, seed=seed)


def _create(job: JobCreate, run_key: str) -> str:
    """Create a job; without its comparison, or the model in it, where the server refuses that."""
    try:
        return create_job(job, run_key).id
    except ApiError as error:
        refused = f"{error.param} {error} {error.details}"
        if job.comparison is None or error.status >= 500 or "comparison" not in refused:
            raise
    # The champion's model may be deleted; a server without extensions knows no comparison at all, not even null.
    get_run_logger().warning("the server refuses the comparison of the job; it gets less of it")
    less = job.model_dump(exclude_unset=True, exclude={"comparison"})
    if job.comparison.model is not None:
        less["comparison"] = {"seed": job.comparison.seed}
    return _create(JobCreate.model_validate(less), run_key)


def _warn_of_few_points(release: ReleaseParameters, data: Prepared) -> None:
    """Say before anything trains that gate T1 will have little to see."""
    for settings in release.settings:
        epochs, batch_size, every = (
            settings.epochs,
            settings.batch_size,
            release.validation_frequency,
        )
        if epochs == "auto" or batch_size == "auto":
            continue
        if every > 1:
            examples = get_dataset(data.dataset_id).num_examples
            every /= max(1, math.ceil(examples / batch_size))
        # One before the first step, and one after the last.
        points = 1 + math.ceil(epochs / every)
        if points < MIN_POINTS:
            get_run_logger().warning(
                "validation_frequency: the validation loss will be measured %d times; fewer than %d "
                "cannot show whether it still falls (gate T1 points)",
                points,
                MIN_POINTS,
            )


def _warmup_steps(job: Job) -> int:
    """The number of warm-up steps as the service resolved it: the release may say "auto"."""
    steps = job.hyperparameters.get("warmup_steps", 0)
    return steps if isinstance(steps, int) else 0


def best_of(jobs: Sequence[Job], metrics: Sequence[JobMetrics]) -> int:
    """Index of the completed job with the lowest validation loss; 0 where none completed."""
    losses = {
        place: lowest_loss(metrics[place].validation_loss)
        for place, job in enumerate(jobs)
        if job.status == JobStatus.COMPLETED
    }
    # A bare server may report no validation loss; then the first job that completed is as good as any.
    known = {place: loss for place, loss in losses.items() if loss is not None}
    return min(known or losses or {0: None}, key=lambda place: known.get(place, math.inf))


def _contenders(jobs: Sequence[Job], metrics: Sequence[JobMetrics], best: int) -> list[Contender]:
    names = {name for job in jobs for name in job.hyperparameters}
    differing = sorted(
        name for name in names if len({str(job.hyperparameters.get(name)) for job in jobs}) > 1
    )
    contenders: list[Contender] = []
    for place, job in enumerate(jobs):
        settings = {name: job.hyperparameters.get(name) for name in differing}
        # A list or a mapping is shown as its text: a set of hyperparameters is one cell of the report.
        shown = {
            name: value if isinstance(value, int | float | str | None) else str(value)
            for name, value in settings.items()
        }
        contender = Contender(
            job_id=job.id,
            status=job.status,
            model=job.fine_tuned_model,
            validation_loss=lowest_loss(metrics[place].validation_loss),
            hyperparameters=shown,
            is_best=place == best,
        )
        contenders.append(contender)
    return contenders


def judge(
    run: ReleaseRun,
    data: Prepared,
    job: Job,
    metrics: JobMetrics,
    champion: Champion | None,
) -> TrainingVerdict:
    """Apply gates T0 to T9 and T11, with a log line for each that does not simply pass. Raises OSError."""
    finished = FinishedJob(
        status=job.status,
        fine_tuned_model=job.fine_tuned_model,
        base_model=job.base_model,
        total_steps=job.total_steps,
        validation_dataset_id=job.validation_dataset_id,
        content_sha256=validation_content(job),
        validation_examples=data.validation_examples,
        duplicates=data.duplicates,
        ends_learnt=job.ends_learnt,
    )
    measured = champion.measured if champion else None
    record = TrainingRecord(finished, metrics.model_dump(), measured, run.release.training_gates)
    run.keep_training(record)
    verdict = record.decide()
    for gate in verdict.gates:
        if gate.state in ("reject", "hold", "warn"):
            get_run_logger().warning("gate %s: %s, %s", gate.name, gate.state, described(gate))
    get_run_logger().info("training gates: %s", verdict.decision)
    return verdict
