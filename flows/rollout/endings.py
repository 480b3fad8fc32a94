"""The endings of a rollout, a function per verdict: each sets the split and returns the `Ended` fact.

Only the baseline is ever deleted, and only in the order of `retire`. Next: `shift_traffic.py`.
"""

from flows.rollout.looks import read_state
from flows.rollout.split import (
    RETURN_TRIES,
    NotConfirmed,
    PausedByPerson,
    RolloutSplit,
    SplitLost,
    describe,
    last_intended,
)
from tasks.deployments import delete_deployment
from tuneship.client import ApiError, TuneshipError
from tuneship.gates.record import Ended, Look, RolloutRecord, SplitIntended, Verdict


def end(split: RolloutSplit, look: Look) -> Ended:
    """Act on a verdict that ends the rollout."""
    if look.verdict is Verdict.BAKED:
        return _promote_and_retire(split)
    if look.verdict is Verdict.ABORT:
        return stop(split, look.reason)
    if look.verdict is Verdict.PAUSE:
        split.keep_for(split.plan.approval_timeout_seconds)
        return Ended("paused", look.reason)
    return roll_back(split, look.reason)


def finish_interrupted(split: RolloutSplit) -> Ended | None:
    """Carry out the end that the record had decided when its run was killed; None where the looks go on."""
    record = split.file.record
    if is_baked(record):
        try:
            return _promote_and_retire(split)
        except PausedByPerson:  # the looks go on until somebody resumes it
            return None
    if record.step_marks() and last_intended(record) == 0:
        return roll_back(split, record.looks[-1].reason if record.looks else "shift_unconfirmed")
    return None


def is_baked(record: RolloutRecord) -> bool:
    """Whether the bake is passed: from here the rollout only goes forward."""
    return any(isinstance(fact, Look) and fact.verdict is Verdict.BAKED for fact in record.facts)


def _promote_and_retire(split: RolloutSplit) -> Ended:
    promoted = promote(split)
    split.notes += retire(split)
    return promoted


def roll_back(
    split: RolloutSplit, reason: str, outcome: str = "rolled_back", tries: int = RETURN_TRIES
) -> Ended:
    """Give the baseline all traffic, and read it back."""
    try:
        split.give_back(reason, tries)
    except NotConfirmed as error:
        split.log.critical("the traffic was not returned: %s", error)
        return Ended("rollback_incomplete", reason)
    return Ended(outcome, reason)


def stop(split: RolloutSplit, reason: str) -> Ended:
    """Give up a rollout without a baseline: the split stays, and no lease may return the traffic any more."""
    split.log.critical("stopped without a rollback: %s", reason)
    try:
        split.end_lease()
    except (TuneshipError, NotConfirmed, SplitLost) as error:
        split.log.critical("the lease could not be ended (%s)", describe(error))
    return Ended("aborted", reason)


def lost(split: RolloutSplit, reason: str) -> Ended:
    """End a rollout whose split was replaced by somebody else, by the lapsed lease or by a person's revert; do not
    touch the split.
    """
    record = split.file.record
    if reason in ("lease_expired", "human_rejected"):
        split.file.append_if_possible(SplitIntended(0, reason))
        split.confirm(0)
        return Ended("rolled_back", reason)
    if not record.step_marks():
        return Ended("rejected", "rollout_in_progress")
    return Ended("aborted", reason)


def promote(split: RolloutSplit) -> Ended:
    """End the lease, so that the candidate keeps all traffic. Raises `NotConfirmed` or `SplitLost`."""
    split.end_lease()
    return Ended("promoted", "none")


def retire(split: RolloutSplit) -> list[str]:
    """Delete the baseline of a promoted rollout. Returns notes for the reader; a refusal keeps the baseline.

    First the split is read back at 100 %, no lease names the baseline, and the candidate is running. The delete drains
    what the baseline still generates; the looks at 100 % have kept new requests away from it.
    """
    baseline, candidate = split.plan.baseline_deployment_id, split.plan.candidate_deployment_id
    if not split.plan.retire_baseline:
        return [f"baseline {baseline} is kept"]
    try:
        if split.verify().lease is not None:
            return [f"baseline {baseline} is kept: a lease names it"]
        if read_state(candidate).status != "running":
            return [f"baseline {baseline} is kept: the candidate is not running"]
        try:
            delete_deployment(baseline)
        except ApiError as error:
            if error.status == 409:  # the split still names it
                split.leave_alone()
                delete_deployment(baseline)
            elif error.status != 404:
                raise
    except (TuneshipError, SplitLost) as error:
        return [f"baseline {baseline} is kept ({describe(error)})"]
    return []
