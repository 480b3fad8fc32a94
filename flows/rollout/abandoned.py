"""Finds the rollouts whose driver is dead, and ends each of them.

A driver lives while it holds its endpoint's lock or writes looks. The traffic of a dead one returns to the baseline by
the rules of `rollback.py`; a rollout that had passed its bake is promoted. Next: `flows/guard.py`.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, Field

from flows.rollout.endings import lost, roll_back
from flows.rollout.opening import settle
from flows.rollout.promotion_approval import withdraw_question
from flows.rollout.record_file import Damaged, RecordFile, RecordFolder, read_record
from flows.rollout.rollback import STOP_TRIES, end_stopped
from flows.rollout.split import (
    PLAIN,
    Log,
    RolloutSplit,
    SplitLost,
    describe,
    split_of_record,
)
from tuneship.client import TuneshipError
from tuneship.contract.errors import ResourceNotFound
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Ended

# One or two looks may be late because a call waited for its time-out.
SILENT_LOOKS = 3


class AbandonedRollout(BaseModel):
    """The end of one rollout whose driver was dead."""

    rollout_id: str
    endpoint_id: str
    outcome: str = Field(description="As in the result of `shift_traffic`.")
    reason: str


@dataclass(frozen=True)
class GuardView:
    """The guard's view: the records, the present time, and how long a driver may be silent at least."""

    folder: RecordFolder
    now: datetime
    silence: timedelta
    log: Log


def finish_abandoned(watch: GuardView) -> tuple[list[AbandonedRollout], list[str]]:
    """End every abandoned rollout. Returns them, and notes for people about those that could not be ended."""
    found: list[AbandonedRollout] = []
    notes: list[str] = []
    try:
        paths = watch.folder.paths()
    except OSError as error:
        return [], [f"the records {watch.folder.path} cannot be read ({error.strerror})"]
    for path in paths:
        try:
            file = read_record(path)
            if isinstance(file, Damaged):
                notes.append(file.why)
                continue
            if finished := _finish(file, watch):
                abandoned, unwritten = finished
                found.append(abandoned)
                notes += unwritten
        except TuneshipError as error:
            notes.append(f"{path.stem} is left as it is ({describe(error)})")
        except Exception as error:  # no single record may stop the others
            watch.log.exception("%s is left as it is", path.stem)
            notes.append(f"{path.stem} is left as it is ({type(error).__name__})")
    return found, notes


def _finish(file: RecordFile, watch: GuardView) -> tuple[AbandonedRollout, list[str]] | None:
    """End the rollout; None if it is alive, paused in time, or over. Notes name the gaps in its record.

    A rollout that is `rollback_incomplete` stays open for the next guard.
    """
    if not file.record.facts or not file.may_have_traffic:
        return None
    plan = CanaryPlan.model_validate(file.record.begun.plan)
    with watch.folder.lock(plan) as is_free:
        # Its driver may have ended it while it was read; from here on the lock keeps every driver away.
        file = RecordFile(file.path)
        if not is_free or not file.may_have_traffic:
            return None
        # The lock is known on this host only; a driver on another one shows by the looks that it writes.
        written = datetime.fromtimestamp(file.path.stat().st_mtime, UTC)
        patience = max(watch.silence, timedelta(seconds=SILENT_LOOKS * plan.look_every_seconds))
        if file.is_paused:  # nothing is written while a person thinks
            patience = timedelta(seconds=plan.approval_timeout_seconds)
        is_late = watch.now - written > patience
        # Nobody drives one that is paused, so nobody else would notice what a person did at the service.
        if not is_late and not (file.is_paused and _is_reverted(plan, file, watch)):
            return None

        try:
            ended = _end(plan, file, watch)
        except SplitLost as error:
            ended = lost(RolloutSplit(plan, file, None, watch.log), error.reason)
        file.append_if_possible(ended)
        withdraw_question(file, ended.outcome)
        rollout_id, endpoint_id = file.record.begun.rollout_id, file.record.begun.endpoint_id
        watch.log.warning("%s on %s: %s", rollout_id, endpoint_id, ended.outcome)
        end = AbandonedRollout(
            rollout_id=rollout_id,
            endpoint_id=endpoint_id,
            outcome=ended.outcome,
            reason=ended.reason,
        )
        return end, file.unwritten


def _is_reverted(plan: CanaryPlan, file: RecordFile, watch: GuardView) -> bool:
    with suppress(TuneshipError):
        split = split_of_record(plan, file, watch.log, PLAIN)
        return split.is_extended and split.was_reverted(split.calls.get(split.endpoint_id))
    return False


def _end(plan: CanaryPlan, file: RecordFile, watch: GuardView) -> Ended:
    """End the rollout by its record. Raises `SplitLost` where the split no longer belongs to it."""
    begun, since = file.record.begun, file.path.stat().st_mtime
    for path in watch.folder.paths():
        with suppress(OSError, ValueError):  # a record that cannot be read shows no rollout
            if path.stat().st_mtime <= since:
                continue
            record = RecordFile(path).record
            if record.weight > 0 and record.begun.endpoint_id == begun.endpoint_id:
                # The endpoint has had another rollout since: the split is that one's now.
                return Ended("aborted", "foreign_change")

    try:
        split = split_of_record(plan, file, watch.log, PLAIN)
    except ResourceNotFound:
        return Ended("aborted", "endpoint_missing")
    if split.is_extended:  # a split that cannot be read back would be set here, only to be returned
        settle(split)
    if file.is_paused:
        return roll_back(split, "approval_timeout", tries=STOP_TRIES)
    return end_stopped(split, "abandoned")
