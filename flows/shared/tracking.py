"""Writes a release into the trackers of its settings: MLflow, TensorBoard, Weights & Biases.

It never fails a release: whatever goes wrong is a line of the log and of the result. Next: `tuneship/tracking/`.
"""

from collections.abc import Sequence

from prefect import Task, get_run_logger
from prefect.cache_policies import NO_CACHE

from tuneship.prefect.connection import api
from tuneship.settings import TrackingSettings
from tuneship.tracking.job_facts import run_of_job
from tuneship.tracking.outside import write_outside
from tuneship.tracking.targets import targets_of
from tuneship.tracking.tracked_run import TrackedRelease, TrackingReport

# Reading one job takes a call for it, its metrics, and each part of its data.
FACTS_WITHIN_S = 30.0


def track(
    settings: TrackingSettings,
    job_id: str | None,
    release: TrackedRelease,
    other_jobs: Sequence[str] = (),
) -> list[TrackingReport]:
    """Write the job with its release, and other jobs with it. Returns a report for each tracker; never raises."""
    try:
        if job_id is None or not targets_of(settings):
            return []

        # Without parameters: Prefect would link them to the runs that returned the same strings.
        def write() -> list[TrackingReport]:
            client = api(FACTS_WITHIN_S)
            released = run_of_job(client, job_id)
            released.release = release
            runs = [*(run_of_job(client, one) for one in other_jobs), released]
            # The released one is written last, so that a report names its place.
            return write_outside(runs, targets_of(settings), settings.tracking_timeout_s)

        tracked = Task(
            write,
            name="track",
            task_run_name=f"track-{job_id}",
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        reports = tracked()
    except Exception as error:  # noqa: BLE001 - the release has ended, and no tracker may change that
        get_run_logger().warning("the release was not tracked (%s)", type(error).__name__)
        return []
    for report in reports:
        if report.problem is None:
            get_run_logger().info("%s: %s", report.tracker, report.place)
        else:
            get_run_logger().warning("%s: not written: %s", report.tracker, report.problem)
    return reports
