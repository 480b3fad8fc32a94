"""One run of the chain while it goes on: its key, its record, and the result as far as it is known.

Everything is written to the record before the next step, so that a killed run can be repeated. Next:
`flows/release/record_file.py` for the file, `flows/release/reports/report.py` for what people read.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import get_run_logger
from prefect.logging import get_logger
from prefect.runtime import flow_run
from pydantic_core import to_jsonable_python

from flows.forms.release_form import ReleaseParameters
from flows.release.champion import Champion
from flows.release.clean_up import discard_deployments, is_gone
from flows.release.data import Prepared
from flows.release.gate_approval import ask_about
from flows.release.held_out import HeldOutGate
from flows.release.record_file import (
    REFUSED_FOR,
    DamagedRecord,
    ReleaseRecord,
    ReleaseRecords,
)
from flows.release.reports.assets import record_deployment
from flows.release.reports.card import write_card
from flows.release.reports.report import write_report
from flows.release.reports.tracked import chosen_trackers, track_release
from flows.release.result import Accuracy, Contender, ReleaseResult
from flows.rollout.opening import explained
from flows.rollout.record_file import records_in_use
from flows.rollout.result import RollbackIncomplete, RolloutResult, rejected, result_of
from flows.shared.approval import is_prefect_shared
from flows.shared.errors import BadInput
from flows.shared.links import show_link
from flows.shared.private_files import make_private
from flows.shared.signals import uninterrupted
from tasks.deployments import create_deployment
from tuneship.contract.jobs import Job
from tuneship.contract.model_card import CardQuestion
from tuneship.dossier.components import COMPONENTS, components_running
from tuneship.gates.gate_result import GateResult
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.training.training_gates import TrainingVerdict
from tuneship.gates.training.training_record import TrainingRecord
from tuneship.host.durable import write_private
from tuneship.prefect.connection import service_name
from tuneship.prefect.waits import wait_for_deployment
from tuneship.settings import PipelineSettings

# Outcomes after which no traffic needs the candidate. A pause and an incomplete rollback may leave it some.
UNSUCCESSFUL = ("rejected", "rolled_back", "aborted")
# Outcomes of a rollout that are final, even if its release was killed before it recorded them.
DECIDED = ("promoted", "rolled_back")
RESULT_FILE = "result.json"
# The records of the releases that this process began, in their order.
_begun: list[Path] = []


@dataclass
class ReleaseRun:
    """One run of the chain: its parameters, its record, and the result as far as it is known."""

    release: ReleaseParameters
    records: ReleaseRecords
    record: ReleaseRecord
    key: str
    # The result's fields that are known so far.
    known: dict[str, Any] = field(default_factory=dict[str, Any])
    gates: list[GateResult] = field(default_factory=list[GateResult])
    notes: list[str] = field(default_factory=list[str])

    @property
    def model(self) -> str:
        """Id of the model that is released; empty until it is known."""
        return self.known.get("model") or ""

    def remember(self, kind: str, resource_id: str, **fields: Any) -> None:
        """Record a resource that was created, and link it on the run's page."""
        self.record.add(kind, datetime.now(UTC), id=resource_id, **fields)
        show_link(kind, resource_id)

    def find_job(self, content: Sequence[str], settings: str) -> str | None:
        """Find the job that this run created on the same data with these settings before it was killed."""
        made = [fact for fact in self.record.facts if fact["kind"] == "job"]
        same = [
            job
            for job in made
            if (job["content"], job.get("settings")) == (list(content), settings)
        ]
        return same[-1]["id"] if same else None

    def rejected_if_rolled_back(self, content: Sequence[str]) -> ReleaseResult | None:
        """Refuse a release that was rolled back in the last 24 hours: same base model, data, hyperparameters, tags."""
        what = [
            self.release.base_model,
            list(content),
            [
                settings.model_dump(mode="json", exclude_defaults=True)
                for settings in self.release.settings
            ],
            # Tags can change how a deployment answers, so other tags make another release.
            self.release.deployment.tags,
        ]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        now = datetime.now(UTC)
        at = self.records.rolled_back_since(digest, now)
        self.record.add("release", now, digest=digest)
        if at is None or self.release.force:
            return None
        until = (at + REFUSED_FOR).strftime("%Y-%m-%d %H:%M")
        return self.rejected(
            "rolled_back_recently",
            f"the same release was rolled back; until {until} UTC use `force`",
        )

    def use_model(self, model: str) -> ReleaseResult | None:
        """Release a model that exists already. Returns the result where that is refused."""
        self.known["model"] = model
        return self.rejected_if_rolled_back([model])

    def set_champion(self, champion: Champion | None) -> None:
        """Note the champion that the new model is compared with."""
        if champion is not None:
            self.known["champion_model"] = champion.model
            best = champion.measured.best_validation_loss if champion.measured else None
            self.known["champion_validation_loss"] = best

    def set_job(self, job: Job, contenders: Sequence[Contender] = ()) -> None:
        """Note the job that is released, and the others beside it."""
        self.known |= {"job_id": job.id, "model": job.fine_tuned_model}
        self.known["contenders"] = list(contenders)
        self.record.add("trained", datetime.now(UTC), id=job.id)

    def keep_training(self, record: TrainingRecord) -> None:
        """Write what the training gates are decided from beside the release's record. Raises OSError."""
        write_private(self.record.training_file, record.to_json() + "\n")

    def check_training(self, verdict: TrainingVerdict) -> ReleaseResult | None:
        """Note the training gates. Returns the result where they refuse; a person may overrule gates that hold."""
        self.gates += verdict.gates
        self._note(
            "training_gates", verdict.gates, decision=verdict.decision, reason=verdict.reason
        )
        if verdict.decision == "pass":
            return None
        refusing = next(gate for gate in verdict.gates if gate.name == verdict.reason)
        if verdict.decision == "reject" or self.release.canary.approval != "required":
            return self.refused_by(refusing)
        said = self._ask_about([gate for gate in verdict.gates if gate.state == "hold"])
        return None if said is None else self.refused_by(refusing, said)

    def check_smoke_test(self, gate: GateResult) -> ReleaseResult | None:
        """Note the smoke test's gate. Returns the result where it refuses."""
        self.gates.append(gate)
        self._note("smoke_test", [gate])
        return None if gate.state == "pass" else self.refused_by(gate)

    def check_evaluation(self, found: HeldOutGate | None) -> ReleaseResult | None:
        """Note the gate on held-out examples. Returns the result where it refuses."""
        if found is None:
            return None
        gate = found.result
        self.gates.append(gate)
        self.notes += found.notes
        self.known["evaluation"] = found.findings
        evaluation_id = found.findings.evaluation_id if found.findings else None
        examples = found.findings.examples if found.findings else None
        counts = examples.model_dump() if examples else None
        self._note("evaluation", [gate], id=evaluation_id, verdict=gate.state, examples=counts)
        if gate.state == "pass":
            return None
        if gate.state == "hold" and self.release.evaluation.on_inconclusive == "continue":
            self.notes.append(f"gate {gate.name} holds, and the release continues: {gate.note}")
            return None
        if gate.state == "hold" and self.release.canary.approval == "required":
            said = self._ask_about([gate])
            return None if said is None else self.refused_by(gate, said, "evaluation")
        return self.refused_by(gate, reason="evaluation")

    def note_data(self, data: Prepared) -> None:
        """Record the data of this run by ids, digests and counts."""
        self.record.add_if_possible("data", datetime.now(UTC), **dataclasses.asdict(data))

    def _note(self, kind: str, gates: Sequence[GateResult], **fields: Any) -> None:
        """Record the numbers behind a decision; the disk need not take them, since nothing is resumed from them."""
        shown = [dataclasses.asdict(gate) for gate in gates]
        self.record.add_if_possible(kind, datetime.now(UTC), **fields, gates=shown)

    def _ask_about(self, held: Sequence[GateResult]) -> str | None:
        """Ask a person about gates that hold; None where the release goes on, else what was decided."""
        limit = self.release.canary.approval_timeout_seconds
        answer = ask_about(held, self.model, self.key, self.record, limit)
        question = CardQuestion(
            about=[gate.name for gate in held],
            decision=answer.decision,
            approver=answer.approver,
            comment=answer.comment,
            person=answer.person,
            at=datetime.now(UTC),
        )
        self.known["questions"] = [*self.known.get("questions", []), question]
        if answer.decision != "promote":
            return answer.said
        self.notes.append(f"gates that hold, a person decided: {answer.said}")
        return None

    def refused_by(
        self, gate: GateResult, said: str = "", reason: str = "training_gate"
    ) -> ReleaseResult:
        """The result of a gate that fails, or that holds and no person overruled."""
        self.known["gate"] = gate.name
        why = "; ".join(part for part in (described(gate), said) if part)
        # A line of the log has said so already.
        return self._result(rejected(reason, f"gate {gate.name}: {gate.state}, {why}"))

    def rejected(self, reason: str, note: str) -> ReleaseResult:
        """The result of a release that is refused before any traffic moved; a line of the log says why."""
        return self._result(explained(rejected(reason, note), get_run_logger()))

    def deploy(self, role: str, model: str, tags: Mapping[str, str]) -> str:
        """Return a running deployment: the one that this run created before it was killed, or a new one."""
        made = self.record.made(role)
        if made is None or is_gone(made):
            suffix = self.record.deployment_suffix(role)
            wanted = self.release.deploy(model, suffix, dict(tags))
            made = create_deployment(wanted, self.key).id
            self.remember(role, made)
            get_run_logger().info("%s: %s is deployed as %s", role, model, made)
        self.known[f"{role}_deployment_id"] = made
        wait_for_deployment(made)
        return made

    def set_accuracy(self, accuracy: Accuracy | None) -> None:
        """Note the accuracy of both deployments."""
        self.known["accuracy"] = accuracy

    def record_plan(self, plan: CanaryPlan) -> None:
        """Record the plan, so that another process can return the traffic."""
        self.known["baseline_deployment_id"] = plan.baseline_deployment_id
        self.record.add(
            "rollout",
            datetime.now(UTC),
            plan=plan.model_dump(mode="json"),
            known=to_jsonable_python(self.known),
            gates=[dataclasses.asdict(gate) for gate in self.gates],
            notes=self.notes,
        )

    def rollout_to_resume(self) -> CanaryPlan | RolloutResult | None:
        """The rollout in which this run was killed: the plan of an open one, or the result of a decided one.

        None where no rollout began, or where its traffic was returned from outside: the chain then begins it again.
        """
        begun = self.record.last("rollout")
        if begun is None:
            return None
        plan = CanaryPlan.model_validate(begun["plan"])
        files = records_in_use().of(plan)
        if not files:
            return None
        result = None if files[-1].is_open else result_of(files[-1].record, [])
        if result is not None and result.outcome not in DECIDED:
            return None
        self.known = dict(begun.get("known", {}))
        self.gates = [GateResult(**gate) for gate in begun.get("gates", [])]
        self.notes = list(begun.get("notes", []))
        get_run_logger().info("the rollout of %s continues", plan.candidate_deployment_id)
        return result or plan

    def result_of_rollout(self, rollout: RolloutResult) -> ReleaseResult:
        """The release's result, from that of its rollout."""
        if rollout.endpoint_id:
            # A new string: Prefect tracks by object identity which run an input came from, and its UI (3.8) lists no
            # task run at all when a task's input is the result of a flow run.
            rollout.endpoint_id = rollout.endpoint_id.encode().decode()
        return self._result(rollout)

    def _result(self, rollout: RolloutResult) -> ReleaseResult:
        gates = [dataclasses.asdict(gate) for gate in self.gates]
        rollout.notes = [*self.notes, *rollout.notes]
        return ReleaseResult(
            **rollout.model_dump(),
            run_key=self.key,
            record=str(self.record.path),
            training_gates=gates,
            **self.known,
        )


def begin(release: ReleaseParameters) -> ReleaseRun:
    """Open the record of this run. Raises `BadInput` when a given `run_key` is used up, in use or unreadable."""
    records = ReleaseRecords(PipelineSettings().records)
    for known in records:
        if known.damage:
            get_run_logger().warning(known.damage)
    try:
        record = records.of(release.digest(), release.run_key)
    except DamagedRecord as error:
        raise BadInput(f"run_key: {error}") from None
    if not record.hold():
        raise BadInput("another run with these parameters is in progress")
    ended = record.last("ended")
    if ended is not None and record.has_ended:
        raise BadInput(f"run_key: that run has ended as {ended['outcome']}; choose another")
    # The key is random, so that a run whose records folder is lost or not shared never adopts another run's
    # resources.
    own_key = record.run_key if record.last("begun") else f"{record.path.stem}-{uuid4().hex[:8]}"
    key = release.run_key or own_key
    record.add(
        "begun",
        datetime.now(UTC),
        run_key=key,
        flow_run_id=str(flow_run.id),
        root_flow_run_id=str(flow_run.root_flow_run_id),
        service=service_name(),
        endpoint_id=release.endpoint.id,
        endpoint_name=release.endpoint.name,
        model_name=release.model_name,
        links={"prefect_run": str(flow_run.ui_url)} if is_prefect_shared() else {},
    )
    # Of an earlier run with this record, which was paused, say. No release fails because no report can be written.
    with suppress(FileNotFoundError, NotADirectoryError):
        (report_folder(record) / RESULT_FILE).unlink()
    parameters = release.model_dump_json(exclude={"tracking"}, exclude_unset=True, by_alias=True)
    write_private(record.parameters_file, parameters + "\n")
    _begun.append(record.path)
    return ReleaseRun(release, records, record, key)


def finish(run: ReleaseRun, result: ReleaseResult) -> ReleaseResult:
    """Delete the deployments of an unsuccessful release, end the record, write report, model card and trackers."""
    log = get_run_logger()
    if result.outcome in UNSUCCESSFUL:
        # Before the end is recorded: what a kill leaves over here, the next run or the guard still finds.
        kept = discard_deployments(run.record)
        result.notes += kept
        candidate = result.candidate_deployment_id
        result.candidate_deleted = candidate is not None and is_gone(candidate)
    ended = {"outcome": result.outcome, "reason": result.reason}
    run.record.add_if_possible("ended", datetime.now(UTC), **ended)
    result.notes += run.record.unwritten
    try:
        folder = report_folder(run.record)
        result.report = str(write_report(result, run.release, folder))
        write_private(folder / COMPONENTS, json.dumps(components_running(), indent=2) + "\n")
    except Exception as error:  # the release has ended, and no report may change that
        log.exception("the report could not be written")
        result.notes.append(f"the report could not be written ({type(error).__name__})")
    write_card_of(run.record, run.release, result)
    log.info("%s; report: %s", result.headline, result.report or "none")
    record_deployment(result)
    # Last: the traffic and the record are settled, whatever a tracker does.
    track_release(chosen_trackers(run.release.tracking), result)
    write_result(run.record, result)
    return result


def report_folder(record: ReleaseRecord) -> Path:
    """The folder of a run's report, its pictures, its model card and its result."""
    return PipelineSettings().reports.expanduser() / record.path.stem


def write_card_of(record: ReleaseRecord, release: ReleaseParameters, result: ReleaseResult) -> None:
    """Write the model card of a run, and its digest into the record. Never raises."""
    log = get_logger("tuneship.release")
    try:
        file, digest = write_card(result, release, report_folder(record))
    except Exception as error:  # noqa: BLE001 - the release has ended, and no card may change that
        # Without the error's text, which may quote a statement.
        log.warning("the model card was not written (%s)", type(error).__name__)
        result.notes.append(f"the model card could not be written ({type(error).__name__})")
        return
    result.model_card = str(file)
    record.add_if_possible("model_card", datetime.now(UTC), sha256=digest)
    log.info("model card: %s", file)


def write_result(record: ReleaseRecord, result: ReleaseResult) -> None:
    """Write the result beside the report, for the dossier. Never raises."""
    folder = report_folder(record)
    try:
        make_private(folder)
        text = json.dumps(result.model_dump(mode="json"), indent=2) + "\n"
        write_private(folder / RESULT_FILE, text)
    except OSError as error:
        log = get_logger("tuneship.release")
        log.warning("the result was not written (%s)", error.strerror)


def keep_what_is_known(run: ReleaseRun, error: BaseException) -> None:
    """Write the result of a run that an error or a stop ends; the clean-up completes it. Never raises."""
    if isinstance(error, RollbackIncomplete) and isinstance(error.result, RolloutResult):
        rollout = error.result
        ended = {"outcome": rollout.outcome, "reason": rollout.reason}
        run.record.add_if_possible("ended", datetime.now(UTC), **ended)
    else:
        reason = "failed" if isinstance(error, Exception) else "cancelled"
        rollout = RolloutResult(outcome="aborted", reason=reason)
    with uninterrupted():
        write_result(run.record, run.result_of_rollout(rollout))


def result_of_this_process() -> ReleaseResult | None:
    """The result of the newest release that this process began, also one that was stopped; None without one."""
    try:
        file = report_folder(ReleaseRecord(_begun[-1])) / RESULT_FILE
        return ReleaseResult.model_validate_json(file.read_bytes())
    except (IndexError, FileNotFoundError):
        return None


def described(gate: GateResult) -> str:
    """The gate's value beside its limit, and its own note."""
    is_measured = gate.value is not None and gate.limit is not None
    numbers = f"{gate.value:.4g} against a limit of {gate.limit:.4g}" if is_measured else ""
    return "; ".join(part for part in (numbers, gate.note) if part)
