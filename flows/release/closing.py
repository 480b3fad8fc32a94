"""Closes a release that its run did not end: after an error, a stop, a kill, or a rollback that is not confirmed.

The rest of its traffic, its job and its deployments are seen to, its record ends, and its result and model card are
written. Works from the records alone, so that a hook in a new process or the guard can do it; may be repeated.
"""

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging import get_logger

from flows.forms.release_form import ReleaseParameters
from flows.release.clean_up import is_gone, undo
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.release.release_run import (
    RESULT_FILE,
    UNSUCCESSFUL,
    report_folder,
    write_card_of,
    write_result,
)
from flows.release.result import ReleaseResult
from flows.rollout.record_file import NOT_THE_END, RecordFile, records_in_use
from flows.rollout.result import result_of
from flows.rollout.rollback import return_traffic
from flows.shared.signals import uninterrupted
from tuneship.client import TuneshipError
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Ended
from tuneship.gates.training.training_record import training_record
from tuneship.settings import PipelineSettings

_LOG = get_logger("tuneship.clean_up")


def clean_up(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """State hook for crashed, failed or cancelled runs. Prefect passes these arguments by name."""
    record = ReleaseRecords(PipelineSettings().records).of_flow_run(str(flow_run.id))
    if record is None or record.has_ended:
        return
    with uninterrupted():
        rollout = record.last("rollout")
        if rollout is not None:
            # The rollout's own hook reads its plan from the parameters of its flow run.
            parameters = {"parameters": {"plan": rollout["plan"]}}
            return_traffic(flow, flow_run.model_copy(update=parameters), state)
        if record.damage:
            _LOG.critical(record.damage)
            return
        try:
            notes = close(record, "stopped")
        except TuneshipError as error:
            # The record stays open: the next run resumes it, or the guard closes it.
            _LOG.warning("nothing could be deleted (%s)", type(error).__name__)
            return
        for note in notes:
            _LOG.warning(note)


def close(record: ReleaseRecord, reason: str) -> list[str]:
    """End a release, with this reason where its run left none. Returns notes on what is kept.

    Raises `TuneshipError` where the service does not answer. Then, and while its rollout may have traffic, the record
    stays open.
    """
    rollouts = _rollouts(record)
    result = result_of_record(record, reason, rollouts)
    try:
        if not any(file.may_have_traffic for file in rollouts):
            if result.outcome in UNSUCCESSFUL:
                result.notes += undo(record)
            if result.outcome not in NOT_THE_END:
                ended = {"outcome": result.outcome, "reason": result.reason}
                record.add_if_possible("ended", datetime.now(UTC), **ended)
    finally:
        candidate = record.made("candidate")
        result.candidate_deployment_id = candidate
        result.candidate_deleted = candidate is not None and is_gone(candidate)
        _write(record, result)
    return result.notes + record.unwritten


def result_of_record(
    record: ReleaseRecord, reason: str, rollouts: list[RecordFile]
) -> ReleaseResult:
    """The result of a run that did not end by itself, from its records and from what it wrote when it was stopped."""
    known: dict[str, Any] = {
        "outcome": "aborted",
        "reason": reason,
        "run_key": record.run_key,
        "record": str(record.path),
        "job_id": record.made("trained") or record.made("job"),
    }
    judged = [fact for fact in record.facts if fact["kind"] in ("smoke_test", "evaluation")]
    gates = [gate for fact in judged for gate in fact["gates"]]
    unread: list[str] = []
    with _noted(record.training_file, unread):
        training = training_record(record.training_file.read_text())
        known["model"] = training.job.fine_tuned_model
        gates = [*map(dataclasses.asdict, training.decide().gates), *gates]
    known["training_gates"] = gates
    file = report_folder(record) / RESULT_FILE
    with _noted(file, unread):
        left = ReleaseResult.model_validate_json(file.read_bytes())
        # Another folder of records may share the one of the reports.
        known |= left.model_dump() if left.run_key == record.run_key else {}
    begun = record.last("rollout")
    if begun is not None:
        notes = begun.get("notes", [])
        known |= begun.get("known", {}) | {"training_gates": begun.get("gates", []), "notes": notes}
        if rollouts and isinstance(rollouts[-1].record.facts[-1], Ended):
            known |= result_of(rollouts[-1].record, notes).model_dump()
    known["notes"] = [*known.get("notes", []), *unread]
    return ReleaseResult.model_validate(known)


@contextmanager
def _noted(file: Path, notes: list[str]) -> Generator[None]:
    """Do without a file that the release has not written, and with a note without one that cannot be read.

    What must be deleted is in the record, and no file beside it may keep it alive.
    """
    try:
        yield
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        # Without the error's text, which may quote a statement.
        _LOG.warning("%s cannot be read (%s)", file, type(error).__name__)
        notes.append(f"{file} cannot be read ({type(error).__name__})")


def _rollouts(record: ReleaseRecord) -> list[RecordFile]:
    begun = record.last("rollout")
    return records_in_use().of(CanaryPlan.model_validate(begun["plan"])) if begun else []


def _write(record: ReleaseRecord, result: ReleaseResult) -> None:
    """Write result and model card. Never raises: the release is over."""
    try:
        release = ReleaseParameters.model_validate_json(record.parameters_file.read_bytes())
    except (OSError, ValueError) as error:
        # Without the error's text, which may quote a statement.
        _LOG.warning("the model card was not written (%s)", type(error).__name__)
        result.notes.append(f"the model card could not be written ({type(error).__name__})")
    else:
        write_card_of(record, release, result)
    # A release may be closed several times, until the service answers.
    result.notes = list(dict.fromkeys(result.notes))
    write_result(record, result)
