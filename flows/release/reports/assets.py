"""The assets of a release, with the numbers that speak for each: its training data, its model, its deployment."""

from dataclasses import asdict

from flows.release.data import Prepared
from flows.release.reports.tracked import measures
from flows.release.result import ReleaseResult
from flows.rollout.tracked import last_states
from flows.shared.assets import asset_key, materialize_asset
from tuneship.contract.jobs import Job
from tuneship.gates.training.training_gates import TrainingVerdict


def record_dataset(data: Prepared) -> None:
    """Record the training data, with the digest of each part."""
    about = {"sha256": list(data.content), "validation_dataset_id": data.validation_dataset_id}
    materialize_asset("dataset", data.dataset_id, about)


def record_model(data: Prepared, job: Job, verdict: TrainingVerdict) -> None:
    """Record the tuned model, with every training gate: state, value and limit."""
    if job.fine_tuned_model is None:
        return
    numbers = ("state", "value", "limit")
    gates = {gate.name: {name: asdict(gate)[name] for name in numbers} for gate in verdict.gates}
    about = {"job_id": job.id, "base_model": job.base_model, "decision": verdict.decision}
    made_from = [asset_key("dataset", data.dataset_id)]
    materialize_asset("model", job.fine_tuned_model, {**about, "gates": gates}, made_from)


def record_deployment(result: ReleaseResult) -> None:
    """Record the candidate where it is kept, with the outcome and the numbers of every gate."""
    if result.candidate_deployment_id is None or result.candidate_deleted:
        return
    about = {
        "outcome": result.outcome,
        "endpoint_id": result.endpoint_id,
        "states": last_states(result),
        "measures": dict(measures(result)),
    }
    made_from = [asset_key("model", result.model)] if result.model else []
    materialize_asset("deployment", result.candidate_deployment_id, about, made_from)
