"""Two automations of the Prefect server: a run that falls silent is marked Crashed, and a crash starts the guard.

State hooks do not run for a run whose process is gone with its worker; these do. They match only the flows of this
package. They are found by name and updated, so running this again changes nothing. `flows/guard.py` says why the guard
is safe to start at any time.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from prefect.automations import (
    Automation,
    ChangeFlowRunState,
    EventTrigger,
    Posture,
    ResourceSpecification,
    RunDeployment,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound

# Three heartbeats of 30 s (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY` of the worker).
SILENT_AFTER = timedelta(seconds=90)
GUARD = "guard/guard"
# Fields with defaults that their annotations do not show.
_Crashed: Any = ChangeFlowRunState
_Run: Any = RunDeployment
RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})
# Flows whose crash may leave traffic or resources behind. Not the guard: one that cannot start,
# for a worker without the package, is Crashed too, and would start the next one for ever.
MOVING = ("retrain", "shift-traffic", "tune-and-deploy")
SIGNS_OF_LIFE = (
    "heartbeat",
    "Completed",
    "Failed",
    "Cancelled",
    "Crashed",
    "Paused",
    "Suspended",
    "TimedOut",
    "Skipped",
)


def of_flows(names: Sequence[str]) -> ResourceSpecification:
    """Match the runs of these flows."""
    flows = {"prefect.resource.role": "flow", "prefect.resource.name": list(names)}
    return ResourceSpecification(flows)


def silent_runs_crash(after: timedelta = SILENT_AFTER) -> Automation:
    """The automation that marks a run Crashed when no heartbeat and no end follows a heartbeat in time."""
    return Automation(
        name="tuneship: a silent run has crashed",
        description="The process of a flow run is gone and nobody said so.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={f"prefect.flow-run.{sign}" for sign in SIGNS_OF_LIFE},
            match=RUNS,
            match_related=of_flows([*MOVING, "guard"]),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=after,
        ),
        actions=[_Crashed(state=StateType.CRASHED, message="no heartbeat")],
    )


def crashes_start_the_guard(guard_id: Any) -> Automation:
    """The automation that starts the guard after a crash; the guard checks every open rollout."""
    return Automation(
        name="tuneship: a crash starts the guard",
        description="Traffic of an abandoned rollout returns to the stable deployment.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            match=RUNS,
            match_related=of_flows(MOVING),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[_Run(source="selected", deployment_id=guard_id)],
    )


def bring_up_to_date(wanted: Automation) -> None:
    """Create the automation or update the one of that name; one that was switched off stays off."""
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(name=wanted.name)
    if found:
        wanted.id, wanted.enabled = found[0].id, found[0].enabled
        wanted.update()
    else:
        wanted.create()


def bring_all_up_to_date() -> None:
    """Create or update both automations on the server at PREFECT_API_URL."""
    bring_up_to_date(silent_runs_crash())
    with get_client(sync_client=True) as client:
        try:
            guard_id = client.read_deployment_by_name(GUARD).id
        except ObjectNotFound:
            raise SystemExit(f"the deployment {GUARD} is not registered") from None
    bring_up_to_date(crashes_start_the_guard(guard_id))
