"""Gate T12: both deployments answer held-out examples before any traffic moves, and graders compare the answers.

The service evaluates; where it does not offer that, `bare_evaluation.py` asks the deployments itself and judges by the
same code. Only counts and line numbers leave this module.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger

from flows.forms.release_form import ReleaseParameters
from flows.release.bare_evaluation import evaluate_here, read_examples, refuse_likelihoods
from flows.release.data import uploaded_dataset
from flows.release.local_files import content_sha256, format_of_file
from flows.release.result import LOSSES_SHOWN, EvaluationFindings
from tasks.evaluations import create_evaluation, list_evaluation_results, list_evaluations
from tuneship.client import ApiError
from tuneship.contract.evaluations import EvaluationStatus
from tuneship.evaluation.scoring import DeploymentGone
from tuneship.gates.evaluation.evaluation_report import EVALUATION_GATE, evaluation_gate
from tuneship.gates.gate_result import GateResult
from tuneship.prefect.waits import wait_for_evaluation

# Statuses of a server that does not know the operation.
NOT_OFFERED = (404, 405, 501)
HERE = "evaluated by the pipeline: the service offers no evaluations, and leaked examples were not looked for"
LEAKS_UNKNOWN = "not all training data are known: leaked examples may be among the held-out ones"
ON_VALIDATION = "evaluated on the validation data, on which the checkpoint was chosen, too"


@dataclass(frozen=True)
class HeldOutGate:
    """The gate's result, what it rests on, and notes for people."""

    result: GateResult
    findings: EvaluationFindings | None
    notes: tuple[str, ...] = ()


def check_evaluation(release: ReleaseParameters) -> None:
    """Refuse what would end the evaluation, before hours of training. Raises `BadInput`."""
    wanted = release.evaluation
    if not wanted.decides:
        return
    file, _ = _source(release)
    if file:
        read_examples(Path(file), wanted, wanted.max_examples)
    if any(one.type in ("choice", "loss") for one in wanted.graders):
        try:
            list_evaluations(limit=1)
        except ApiError as error:
            if error.status not in NOT_OFFERED:
                raise
            refuse_likelihoods(wanted)


def _source(release: ReleaseParameters) -> tuple[str | None, str | None]:
    """The file or the dataset of the held-out examples."""
    wanted, data = release.evaluation, release.data
    if wanted.file or wanted.dataset_id or data is None:
        return wanted.file, wanted.dataset_id
    return data.validation_file, data.validation_dataset_id


def evaluate(
    baseline_id: str, candidate_id: str, release: ReleaseParameters, run_key: str
) -> HeldOutGate | None:
    """Evaluate the candidate beside the baseline; None where the release names no graders."""
    wanted = release.evaluation
    if not wanted.decides:
        return None
    file, dataset_id = _source(release)
    notes = [] if wanted.file or wanted.dataset_id else [ON_VALIDATION]
    if file:
        path = Path(file)
        dataset_id = uploaded_dataset(path, content_sha256(path), format_of_file(path), run_key)
    name = re.sub(r"[^A-Za-z0-9 ._-]+", "-", f"release of {release.model_name}")[:128]
    order = wanted.order(name, str(dataset_id), candidate_id, baseline_id)
    try:
        made = create_evaluation(order, run_key)
    except ApiError as error:
        if error.status not in NOT_OFFERED or error.param is not None:
            raise
        get_run_logger().warning("the service offers no evaluations: the pipeline asks itself")
        try:
            verdict, findings = evaluate_here(baseline_id, candidate_id, wanted, file)
            findings.dataset_id = order.dataset_id
        except DeploymentGone as gone:
            return HeldOutGate(_unfinished(f"a deployment refuses all requests: {gone.code}"), None)
        gate = _gate(verdict, findings, order.margin)
        return HeldOutGate(gate, findings, (*notes, HERE))
    found = wait_for_evaluation(made.id)
    if found.status != EvaluationStatus.COMPLETED:
        why = found.error["code"] if found.error else found.status
        return HeldOutGate(_unfinished(f"{made.id}: {why}"), None, tuple(notes))
    if not found.leaks_checked:
        notes.append(LEAKS_UNKNOWN)
    losses = list_evaluation_results(made.id, outcome="loss")
    findings = EvaluationFindings(
        evaluation_id=made.id,
        dataset_id=found.dataset_id,
        dataset_sha256=found.dataset_sha256,
        rule_version=found.rule_version,
        examples=found.examples,
        leaks_checked=found.leaks_checked,
        used_before=found.used_before,
        sentence=found.sentence or "",
        graders=found.graders,
        slices=found.slices,
        lost_lines=sorted(one.line for one in losses)[:LOSSES_SHOWN],
        record=found.record,
    )
    return HeldOutGate(_gate(found.verdict, findings, order.margin), findings, tuple(notes))


def _unfinished(why: str) -> GateResult:
    """A rejection: nothing is known about the answers, whatever `on_inconclusive` says about too few of them."""
    return GateResult(EVALUATION_GATE, "reject", note=f"the evaluation did not complete: {why}")


def _gate(verdict: str | None, findings: EvaluationFindings, margin: float) -> GateResult:
    get_run_logger().info("gate %s: %s: %s", EVALUATION_GATE, verdict, findings.sentence)
    return evaluation_gate(verdict, findings.graders, margin, findings.sentence)
