"""A person ends a rollout that is paused: promote its candidate now, or roll back. Name and reason are recorded.

`python flows/decide_paused.py --params FILE`, or the form of the deployment `decide-paused`. To let a paused rollout
go on looking instead, run its own plan again.
"""

import sys
from pathlib import Path

if (
    __name__ == "__main__"
):  # a script finds its modules in the project's folder, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flows  # noqa: F401  # pyright: ignore[reportUnusedImport] - first: Prefect looks at its telemetry setting when imported

# isort: split
from typing import Literal

from prefect import flow, get_run_logger
from pydantic import Field

from flows.rollout.endings import lost, promote, roll_back
from flows.rollout.looks import read_state
from flows.rollout.opening import settle
from flows.rollout.promotion_approval import withdraw_question
from flows.rollout.record_file import RecordFile, RecordFolder, records_in_use
from flows.rollout.result import RollbackIncomplete, RolloutResult, rejected, result_of
from flows.rollout.split import NotConfirmed, RolloutSplit, SplitLost, split_of_record
from flows.rollout.tracked import track_rollout
from flows.shared.errors import BadInput
from tuneship.contract.common import READS_AS_WRITTEN, StrictModel
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import ApprovalAnswered, Ended


class Decision(StrictModel):
    """A person's decision about a paused rollout."""

    rollout_id: str = Field(
        pattern=r"^rollout-[0-9a-f]{16}-[0-9]{4,}$",
        description="As the result and the report of the paused run name it (`rollout-...`).",
    )
    decision: Literal["promote now", "roll back"] = Field(
        description="promote now: all traffic to the candidate, whatever is not proven; roll back: to the baseline."
    )
    approver: str = Field(
        min_length=1,
        max_length=200,
        pattern=READS_AS_WRITTEN,
        description="Your name, kept in the audit trail.",
    )
    reason: str = Field(
        min_length=1, max_length=2000, description="Why; kept in the audit trail. No patient data."
    )


@flow(name="decide-paused", flow_run_name="{decision.decision}-{decision.rollout_id}")
def decide_paused(decision: Decision) -> RolloutResult:
    """End the rollout as decided. Raises `BadInput` where none of that id is paused, or its candidate does not run."""
    log = get_run_logger()
    folder = records_in_use()
    plan = CanaryPlan.model_validate(_paused(folder, decision.rollout_id).record.begun.plan)
    with folder.lock(plan) as is_free:
        if not is_free:
            return rejected("rollout_in_progress", "another run drives it", plan.endpoint_id)
        file = _paused(folder, decision.rollout_id)  # it may have ended since it was read
        split = split_of_record(plan, file, log)
        ended = _end(split, decision)
        file.append_if_possible(ended)
        withdraw_question(file, ended.outcome)
    result = result_of(file.record, split.notes + file.unwritten)
    log.info("%s", result.headline)
    track_rollout(plan, result)
    if result.outcome == "rollback_incomplete":
        raise RollbackIncomplete(result, f"the split of {result.endpoint_id} is not confirmed")
    return result


def _paused(folder: RecordFolder, rollout_id: str) -> RecordFile:
    try:
        file = folder.file(rollout_id)
    except ValueError:
        raise BadInput(f"rollout_id: the record of {rollout_id} is damaged") from None
    except OSError as error:
        why = f"the record of {rollout_id} cannot be read ({error.strerror})"
        raise BadInput(f"rollout_id: {why}") from None
    if not file.is_paused:
        raise BadInput(f"rollout_id: {rollout_id} is not paused at this service")
    return file


def _end(split: RolloutSplit, decision: Decision) -> Ended:
    candidate = split.plan.candidate_deployment_id
    is_promoted = decision.decision == "promote now"
    if is_promoted and read_state(candidate).status != "running":
        raise BadInput(f"decision: the candidate {candidate} is not running")
    try:
        settle(split)
        if is_promoted and split.is_paused:
            raise BadInput(
                "decision: a person has paused the endpoint at the service: resume it there"
            )
        if is_promoted:
            split.file.append(ApprovalAnswered("promote", decision.approver, decision.reason))
            # There is no bake, so the baseline is not deleted either.
            try:
                split.shift(100, "promote_now")
                promote(split)
            except NotConfirmed as error:
                split.log.critical("the candidate was not promoted: %s", error)
                return roll_back(split, "shift_unconfirmed")
            baseline = split.plan.baseline_deployment_id
            split.notes.append(f"baseline {baseline} is kept: a person decided")
            return Ended("promoted", "promoted_now")

        # The traffic is returned even where the disk takes no line; a promotion needs its record.
        answer = ApprovalAnswered("roll back", decision.approver, decision.reason)
        split.file.append_if_possible(answer)
        return roll_back(split, "human_rejected")
    except SplitLost as error:
        return lost(split, error.reason)


if __name__ == "__main__":
    from flows.script.main import run_script

    run_script(decide_paused, Decision, "End a paused rollout as a person decides.")
