"""One look at a rollout: ask for both deployments' states and metrics, take the driver's counts, let the gates decide.

What is asked here is put into `tuneship/gates/canary.py`; what comes back is recorded before anything acts on it. A
look is one node on the run page, its calls are the bodies of their tasks: five nodes a look would bury the chain.
"""

import time
from collections.abc import Callable, Iterator
from datetime import datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.rollout.split import RolloutSplit, describe
from flows.rollout.traffic_driver import TrafficDriver
from tasks.deployments import get_deployment
from tasks.metrics import get_deployment_metrics
from tuneship.client import ApiError, TuneshipError
from tuneship.contract.errors import ResourceNotFound
from tuneship.gates.canary import Observed, decide
from tuneship.gates.record import Look, RolloutRecord
from tuneship.gates.series import Json
from tuneship.gates.view import DeploymentState


def every(seconds: float) -> Iterator[None]:
    """Wait for the next look, for ever; a look that took longer than that is followed at once."""
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
    """Not repeated by Prefect: the next look is the retry. `take` is a call, in which Prefect looks for no inputs."""
    return take()


def take_look(split: RolloutSplit, driver: TrafficDriver | None) -> Look:
    """Ask, decide, record. A call that fails is a missing look, never an exception, but for a refused key."""
    plan = split.plan
    baseline, candidate = plan.baseline_deployment_id, plan.candidate_deployment_id
    observed = Observed(
        baseline=seen(baseline),
        candidate=seen(candidate),
        baseline_metrics=_metrics(split, baseline),
        candidate_metrics=_metrics(split, candidate),
    )
    if driver is not None:
        split.file.append(driver.counts.take(baseline, candidate))
    look = decide(observed, plan, split.file.record)
    split.file.append(look)
    return look


def seen(deployment_id: str) -> DeploymentState:
    """A deployment's state; "missing" for a 404, None where it could not be asked."""
    try:
        deployment = get_deployment.fn(deployment_id)
    except ResourceNotFound:
        return DeploymentState("missing")
    except TuneshipError as error:
        raise_if_refused(error)
        return DeploymentState(None)
    is_told = "current_replicas" in deployment.model_fields_set
    return DeploymentState(deployment.status, deployment.current_replicas if is_told else None)


def began(record: RolloutRecord) -> datetime | None:
    """The service's time at which the candidate got its first traffic."""
    return next((mark.at for mark in record.step_marks().values()), None)


def _metrics(split: RolloutSplit, deployment_id: str) -> Json | None:
    try:
        return get_deployment_metrics.fn(
            deployment_id,
            interval=split.plan.interval,
            start_time=began(split.file.record),
            endpoint_id=split.endpoint_id if split.is_extended else None,
        )
    except TuneshipError as error:
        raise_if_refused(error)
        split.log.warning("no metrics of %s (%s)", deployment_id, describe(error))
        return None


def raise_if_refused(error: Exception) -> None:
    """A key that is refused in mid-run is no missing look: the run ends, and the lease returns the traffic."""
    if isinstance(error, ApiError) and error.status in (401, 403):
        raise error
