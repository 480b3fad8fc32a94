"""The part of a rollout's result that is tracked. A rollout of its own, outside a release, is written from here.

The alias `champion` thus follows the traffic also where somebody returns it by hand to the model that served before.
"""

import math
from collections.abc import Iterator
from typing import Any

from prefect import get_run_logger

from flows.rollout.result import RolloutResult
from flows.shared.tracking import track
from tasks.deployments import get_deployment
from tuneship.contract.models import job_of_model
from tuneship.gates.plan import CanaryPlan
from tuneship.settings import TrackingSettings
from tuneship.tracking.targets import targets_of
from tuneship.tracking.tracked_run import TrackedRelease

SHARES = ("candidate_share", "baseline_share", "ratio_limit")


def track_rollout(plan: CanaryPlan, result: RolloutResult) -> None:
    """Write a rollout into the trackers of this process's settings, at the job of its candidate; never raises."""
    try:
        settings = TrackingSettings()
        if not targets_of(settings):
            return
        candidate = _model_of(plan.candidate_deployment_id)
        job_id = job_of_model(candidate)
        serving = candidate if result.outcome == "promoted" else None
        # Read only where it is needed: a promotion may have deleted it.
        if job_id is None or result.outcome == "rolled_back":
            baseline = _model_of(plan.baseline_deployment_id)
            serving = baseline if result.outcome == "rolled_back" else serving
            # A base model has no job; when it serves again, that is news of the tuned one beside it.
            job_id = job_id or job_of_model(baseline)
    except Exception as error:  # noqa: BLE001 - the rollout has ended, and no tracker may change that
        get_run_logger().warning("the rollout was not tracked (%s)", type(error).__name__)
        return
    release = TrackedRelease(
        run_key=result.rollout_id or "",
        outcome=result.outcome,
        reason=result.reason,
        gates=last_states(result),
        measures=dict(last_shares(result)),
        serving=serving,
    )
    reports = track(settings, job_id, release)
    result.notes += [
        f"{one.tracker}: not written: {one.problem}" for one in reports if one.problem is not None
    ]


def _model_of(deployment_id: str) -> str:
    return get_deployment(deployment_id).model_name


def last_states(result: RolloutResult) -> dict[str, str]:
    """The state of each gate when both deployments were last compared."""
    return {name: str(gate["state"]) for name, gate in _last_gates(result).items()}


def last_shares(result: RolloutResult) -> Iterator[tuple[str, float]]:
    """The numbers of each gate at the last comparison, by names such as `gate/error_rate/candidate_share`."""
    for name, gate in _last_gates(result).items():
        for what in SHARES:
            if what in gate and math.isfinite(gate[what]):
                yield f"gate/{name}/{what}", float(gate[what])


def _last_gates(result: RolloutResult) -> dict[str, dict[str, Any]]:
    return result.comparisons[-1]["gates"] if result.comparisons else {}
