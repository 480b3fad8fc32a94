"""One look at a rollout: reads both deployments' states and metrics, takes the driver's counts, lets the gates decide.

`tuneship/gates/canary.py` decides; its `Look` is recorded before anything acts on it. A look is one node on the run
page and calls the bodies of its tasks: five nodes a look would bury the chain.
"""

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.rollout.split import RolloutSplit, describe
from flows.rollout.traffic_driver import TrafficDriver
from tasks.deployments import get_deployment
from tasks.metrics import get_deployment_metrics
from tuneship.client import ApiError, TuneshipError
from tuneship.contract.errors import ResourceNotFound
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.canary import Observed, decide
from tuneship.gates.record import Look, Phase, Resumed, RolloutRecord
from tuneship.gates.tallies import RECENT_BUCKETS
from tuneship.gates.view import DeploymentState


def every(seconds: float) -> Iterator[None]:
    """Yield when the next look is due, for ever; a look that took longer is followed at once."""
    due = time.monotonic()
    while True:
        now = time.monotonic()
        due = max(due + seconds, now)
        time.sleep(due - now)
        yield


def look_once(split: RolloutSplit, driver: TrafficDriver | None) -> Look:
    """Keep the lease and take a look, as one node. Raises `SplitLost` and `NotConfirmed` like the shift."""

    def keep_and_look() -> Look:
        split.keep()
        return take_look(split, driver)

    record = split.file.record
    return _look(len(record.looks) + 1, record.weight, keep_and_look)


@task(cache_policy=NO_CACHE, task_run_name="look-{number}-at-{weight}%")
def _look(number: int, weight: int, take: Callable[[], Look]) -> Look:  # noqa: ARG001 - name the task run
    """Take a look without a retry by Prefect: the next look is the retry. Prefect finds no inputs in a callable."""
    return take()


def take_look(split: RolloutSplit, driver: TrafficDriver | None) -> Look:
    """Read, decide, record. A failed call makes a missing look, never an exception, except for a refused key."""
    plan = split.plan
    baseline, candidate = plan.baseline_deployment_id, plan.candidate_deployment_id
    observed = Observed(
        baseline=read_state(baseline),
        candidate=read_state(candidate),
        baseline_metrics=_metrics(split, baseline),
        candidate_metrics=_metrics(split, candidate),
        is_paused=split.is_paused,
    )
    record = split.file.record
    was_paused = bool(record.looks) and record.looks[-1].is_paused
    # No maximum counts while an approval is waited for, and its question stays open.
    if was_paused and not split.is_paused and record.phase is not Phase.WAIT:
        split.file.append(Resumed())
    if driver is not None:
        split.file.append(driver.counts.take(baseline, candidate))
    look = decide(observed, plan, split.file.record)
    split.file.append(look)
    return look


def read_state(deployment_id: str) -> DeploymentState:
    """Read a deployment's state; "missing" for a 404, None where the call failed."""
    try:
        deployment = get_deployment.fn(deployment_id)
    except ResourceNotFound:
        return DeploymentState("missing")
    except TuneshipError as error:
        raise_if_unauthorized(error)
        return DeploymentState(None)
    has_replicas = "current_replicas" in deployment.model_fields_set
    return DeploymentState(deployment.status, deployment.current_replicas if has_replicas else None)


def began(record: RolloutRecord) -> datetime | None:
    """The service's time of the candidate's first traffic."""
    return next((mark.at for mark in record.step_marks().values()), None)


def _read_from(split: RolloutSplit) -> datetime | None:
    """Ten buckets before the start: they show how slow the baseline's answers may be at first.

    Later from the newest bucket that a look has counted.
    """
    length = timedelta(seconds=split.plan.bucket_seconds)
    if counted := split.file.record.kept.buckets:
        return counted[-1].end - length
    start = began(split.file.record)
    return start - RECENT_BUCKETS * length if start else None


def _metrics(split: RolloutSplit, deployment_id: str) -> DeploymentMetrics | None:
    try:
        return get_deployment_metrics.fn(
            deployment_id,
            interval=split.plan.interval,
            start_time=_read_from(split),
            endpoint_id=split.endpoint_id if split.is_extended else None,
        )
    except TuneshipError as error:
        raise_if_unauthorized(error)
        split.log.warning("no metrics of %s (%s)", deployment_id, describe(error))
        return None


def raise_if_unauthorized(error: Exception) -> None:
    """Raise for a refused key, which is no missing look: the run ends, and the lease returns the traffic."""
    if isinstance(error, ApiError) and error.status in (401, 403):
        raise error
