"""Cleans up after an unsuccessful release: its job, and the deployments that it created itself.

Never deletes the only healthy deployment: a candidate goes only when the split is read back without traffic for it, and
the baseline runs. Works from the release's record alone, and may be repeated. Next: `flows/release/closing.py`.
"""

from datetime import UTC, datetime

from prefect.logging import get_logger

from flows.release.record_file import ReleaseRecord
from tasks.create_once import NO_SUCH_LIST, run_tag, tagged
from tuneship.client import ApiError, TuneshipError
from tuneship.contract.deployments import GONE, DeploymentStatus
from tuneship.contract.endpoints import CanaryEndpoint
from tuneship.prefect.connection import api
from tuneship.prefect.waits import stop_job

_LOG = get_logger("tuneship.clean_up")


def discard_deployments(record: ReleaseRecord) -> list[str]:
    """Delete the candidate, and a baseline that no endpoint uses. Returns notes on what is kept, and why."""
    candidate, baseline = record.made("candidate"), record.made("baseline")
    notes: list[str] = []
    begun = record.last("begun") or {}
    try:
        if begun.get("endpoint_id"):
            endpoint = api().canary_endpoints.get(begun["endpoint_id"])
        else:
            named = api().canary_endpoints.list(name=begun["endpoint_name"]).canary_endpoints
            endpoint = next(iter(named), None)
        if candidate is not None:
            notes += _discard(candidate, _why_kept(candidate, endpoint))
        if baseline is not None and endpoint is None:
            notes += _discard(baseline, None)
    except TuneshipError as error:
        notes.append(f"deployments of this run are kept: {type(error).__name__}")
    return notes


def _why_kept(candidate: str, endpoint: CanaryEndpoint | None) -> str | None:
    """Say why the candidate must stay; None when it may be deleted."""
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
    """Whether a deployment is deleted or being deleted; False where that cannot be known."""
    try:
        return api().deployments.get(deployment_id).status in GONE
    except ApiError as error:
        return error.status == 404
    except TuneshipError:
        return False


def undo(record: ReleaseRecord) -> list[str]:
    """Stop the job and delete the deployments of a release whose traffic was returned. Returns notes on what is kept.

    Raises `TuneshipError`, with nothing done, where the service does not answer.
    """
    # A run that was stopped during a create never saw the answer; what it created carries the run's tag.
    tags, now = run_tag(record.run_key), datetime.now(UTC)
    try:
        for job in tagged(api().jobs.iterate(limit=100, tags=tags), tags):
            if job.id not in record.all_made("job"):
                record.add_if_possible("job", now, id=job.id, content=[], settings="")
        known = {*record.all_made("candidate"), *record.all_made("baseline")}
        for deployment in tagged(api().deployments.iterate(limit=100, tags=tags), tags):
            if deployment.id in known or deployment.status in GONE:
                continue
            is_baseline = deployment.deployment_name.endswith(record.deployment_suffix("baseline"))
            role = "baseline" if is_baseline else "candidate"
            record.add_if_possible(role, now, id=deployment.id)
    except ApiError as error:
        if error.status not in NO_SUCH_LIST:
            raise
        _LOG.warning("the resources created last could not be listed (%d)", error.status)
    if record.last("trained") is None:
        for job_id in record.all_made("job"):
            stop_job(api(), job_id)
    return discard_deployments(record)
