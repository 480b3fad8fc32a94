"""What a release that did not succeed takes away again: its job, and the deployments that it made itself.

Never the only healthy copy: a candidate goes only when the split is read back without traffic for it, and the baseline
runs. Works from the release's record alone, so that a hook in a new process can do it, and twice does nothing.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging import get_logger

from flows.interruption import uninterrupted
from flows.release_record import ReleaseRecord, ReleaseRecords
from flows.rollout.way_back import return_traffic
from tasks.api import api
from tasks.jobs import stop_job
from tuneship.client import ApiError, BadResponse, ServiceUnreachable
from tuneship.contract.deployments import GONE, DeploymentStatus
from tuneship.contract.endpoints import CanaryEndpoint
from tuneship.settings import PipelineSettings

FAILURES = (ApiError, BadResponse, ServiceUnreachable)


def discard_deployments(record: ReleaseRecord) -> list[str]:
    """Delete the candidate, and a baseline that no endpoint came to use. Returns what is kept, and why."""
    candidate, baseline = record.made("candidate"), record.made("baseline")
    notes: list[str] = []
    try:
        endpoint = _endpoint(record)
        if candidate is not None:
            notes += _discard(candidate, _why_kept(candidate, endpoint))
        if baseline is not None and endpoint is None:
            notes += _discard(baseline, None)
    except FAILURES as error:
        notes.append(f"deployments of this run are kept: {type(error).__name__}")
    return notes


def _endpoint(record: ReleaseRecord) -> CanaryEndpoint | None:
    """The endpoint as it is now; None when there is none of that name."""
    begun = record.last("begun") or {}
    if begun.get("endpoint_id"):
        return api().canary_endpoints.get(begun["endpoint_id"])
    return next(
        iter(api().canary_endpoints.list(name=begun["endpoint_name"]).canary_endpoints), None
    )


def _why_kept(candidate: str, endpoint: CanaryEndpoint | None) -> str | None:
    """None when the candidate may go."""
    if endpoint is None:
        return None
    shares = {member.id: member.traffic_percentage for member in endpoint.deployments}
    if shares.get(candidate, 0) > 0:
        return "it has traffic"
    if endpoint.lease and any(member.id == candidate for member in endpoint.lease.fallback):
        fallback = {member.id: member.traffic_percentage for member in endpoint.lease.fallback}
        if fallback[candidate] > 0:
            return "a lease names it"
    serving = next((name for name, share in shares.items() if share == 100), None)
    if serving is None:
        return "no other deployment has all traffic"
    status = api().deployments.get(serving).status
    return None if status == DeploymentStatus.RUNNING else f"the baseline is {status}"


def _discard(deployment_id: str, why_kept: str | None) -> list[str]:
    if why_kept is not None:
        return [f"deployment {deployment_id} is kept: {why_kept}"]
    try:
        api().deployments.delete(deployment_id)
    except ApiError as error:
        if error.status != 404:
            return [f"deployment {deployment_id} is kept: {error}"]
    return []


def is_gone(deployment_id: str) -> bool:
    """Whether a deployment is deleted or on its way there; False where that cannot be known."""
    try:
        return api().deployments.get(deployment_id).status in GONE
    except ApiError as error:
        return error.status == 404
    except (BadResponse, ServiceUnreachable):
        return False


def clean_up(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """State hook of the chain: crashed, failed or cancelled. Prefect calls it with exactly these names."""
    log = get_logger("tuneship.clean_up")
    record = ReleaseRecords(PipelineSettings().records).of_flow_run(str(flow_run.id))
    if record is None or record.last("ended") is not None:
        return
    with uninterrupted():
        for note in _undo(
            record, lambda plan: return_traffic(flow, _rollout(flow_run, plan), state)
        ):
            log.warning(note)
        record.add("ended", datetime.now(UTC), outcome="aborted", reason="stopped")


def _undo(record: ReleaseRecord, give_back: Callable[[dict[str, Any]], None]) -> list[str]:
    job_id, rollout = record.made("job"), record.last("rollout")
    if rollout is not None:
        give_back(rollout["plan"])
    if job_id is not None and record.last("trained") is None:
        stop_job(job_id)
    return discard_deployments(record)


def _rollout(flow_run: FlowRun, plan: dict[str, Any]) -> FlowRun:
    """The run as the roll-out's own hook reads it."""
    return flow_run.model_copy(update={"parameters": {"plan": plan}})
