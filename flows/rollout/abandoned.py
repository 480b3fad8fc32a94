"""Finds the rollouts whose driver is dead, and ends each of them.

A driver lives while it holds its endpoint's lock or writes looks. The traffic of a dead one returns to the baseline by
the rules of `rollback.py`; a rollout that had passed its bake is promoted. Next: `flows/guard.py`.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, Field

from flows.rollout.endings import lost, roll_back
from flows.rollout.opening import settle
from flows.rollout.promotion_approval import withdraw_question
from flows.rollout.record_file import Damaged, RecordFile, RecordFolder, read_record
from flows.rollout.rollback import STOP_TRIES, end_stopped
from flows.rollout.split import PLAIN, Log, RolloutSplit, SplitLost, describe
from tasks.endpoints import get_canary_endpoint
from tuneship.client import TuneshipError
from tuneship.contract.errors import ResourceNotFound
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Ended

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
            with _left(file, watch) as left:
                if left is not None:
                    found.append(_finish(left, watch))
                    notes += left.file.unwritten
        except TuneshipError as error:
            notes.append(f"{path.stem} is left as it is ({describe(error)})")
        except Exception as error:  # no single record may stop the others
            watch.log.exception("%s is left as it is", path.stem)
            notes.append(f"{path.stem} is left as it is ({type(error).__name__})")
    return found, notes


@dataclass(frozen=True)
class Left:
    """A rollout without a driver, held by this process."""

    plan: CanaryPlan
    file: RecordFile


@contextmanager
def _left(file: RecordFile, watch: GuardView) -> Generator[Left | None]:
    """Lock and yield the rollout; None when it is alive, paused in time, or over."""
    if not file.record.facts or not file.may_have_traffic:
        yield None
        return
    plan = CanaryPlan.recorded(file.record.begun.plan)
    with watch.folder.lock(plan) as is_free:
        again = RecordFile(file.path)  # its driver may have ended it while it was read
        is_left = is_free and again.may_have_traffic and _is_silent(again, plan, watch)
        yield Left(plan, again) if is_left else None


def _is_silent(file: RecordFile, plan: CanaryPlan, watch: GuardView) -> bool:
    """Whether nothing was written for three looks and the minimum; for a pause, for as long as a person may take."""
    written = datetime.fromtimestamp(file.path.stat().st_mtime, UTC)
    patience = max(watch.silence, timedelta(seconds=SILENT_LOOKS * plan.look_every_seconds))
    if file.is_paused:
        patience = timedelta(seconds=plan.approval_timeout_seconds)
    return watch.now - written > patience


def _finish(left: Left, watch: GuardView) -> AbandonedRollout:
    """End the rollout and record it. A rollout that is `rollback_incomplete` stays open for the next guard."""
    begun = left.file.record.begun
    try:
        ended = _superseded(left, watch.folder) or _end(left, watch.log)
    except SplitLost as error:
        ended = lost(RolloutSplit(left.plan, left.file, None, watch.log), error.reason)
    left.file.append_if_possible(ended)
    withdraw_question(left.file, ended.outcome)
    watch.log.warning("%s on %s: %s", begun.rollout_id, begun.endpoint_id, ended.outcome)
    return AbandonedRollout(
        rollout_id=begun.rollout_id,
        endpoint_id=begun.endpoint_id,
        outcome=ended.outcome,
        reason=ended.reason,
    )


def _superseded(left: Left, folder: RecordFolder) -> Ended | None:
    """End a rollout whose endpoint has had another one since: the split is that one's now."""
    since, endpoint_id = left.file.path.stat().st_mtime, left.file.record.begun.endpoint_id
    for path in folder.paths():
        with suppress(OSError, ValueError):  # a record that cannot be read shows no rollout
            if path.stat().st_mtime <= since:
                continue
            record = RecordFile(path).record
            if record.weight > 0 and record.begun.endpoint_id == endpoint_id:
                return Ended("aborted", "foreign_change")
    return None


def _end(left: Left, log: Log) -> Ended:
    """End the rollout by its record. Raises `SplitLost` where the split no longer belongs to it."""
    file, begun = left.file, left.file.record.begun
    version: int | None = None
    if not begun.server:
        try:
            version = get_canary_endpoint.fn(begun.endpoint_id).version
        except ResourceNotFound:
            return Ended("aborted", "endpoint_missing")
    split = RolloutSplit(left.plan, file, version, log, calls=PLAIN)
    if split.is_extended:
        settle(split)
    if file.is_paused:
        return roll_back(split, "approval_timeout", tries=STOP_TRIES)
    return end_stopped(split, "abandoned")
