"""Releases that nobody goes on with: their job is stopped, their deployment deleted, their record closed.

Until then a run with the same parameters goes on where the dead one stopped. Never the only healthy copy; the rules are
those of `flows/release/clean_up.py`.
"""

from datetime import UTC, datetime
from pathlib import Path

from flows.release.clean_up import undo
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.rollout.abandoned import GuardView
from flows.rollout.record_file import RecordFolder
from tasks.api import is_this_service
from tuneship.client import TuneshipError
from tuneship.gates.plan import CanaryPlan


def close_abandoned(watch: GuardView, records: Path) -> tuple[list[str], list[str]]:
    """Run keys of the releases that were closed, and what is kept of them and why."""
    closed: list[str] = []
    notes: list[str] = []
    for record in ReleaseRecords(records):
        try:
            if record.damage:
                notes.append(record.damage)
            elif _is_silent(record, watch) and record.hold():
                notes += _close(record, watch)
                closed.append(record.run_key)
        except TuneshipError as error:
            notes.append(f"the release {record.run_key} is left as it is ({type(error).__name__})")
        except (
            Exception
        ) as error:  # one record, whatever is wrong with it, must not stop the others
            watch.log.exception("the release %s is left as it is", record.run_key)
            notes.append(f"the release {record.run_key} is left as it is ({type(error).__name__})")
    return closed, notes


def _close(record: ReleaseRecord, watch: GuardView) -> list[str]:
    try:
        notes = undo(record)
        record.add_if_possible("ended", watch.now, outcome="aborted", reason="abandoned")
    finally:
        record.release()
    return notes + record.unwritten


def _is_silent(record: ReleaseRecord, watch: GuardView) -> bool:
    begun = record.last("begun")
    if begun is None or record.has_ended or not is_this_service(begun.get("service")):
        return False
    written = datetime.fromtimestamp(record.path.stat().st_mtime, UTC)
    return watch.now - written > watch.silence and not _is_rolling_out(record, watch.folder)


def _is_rolling_out(record: ReleaseRecord, folder: RecordFolder) -> bool:
    """Its rollout is alive, paused for a person, or unreadable: then the candidate is, or may be, in use."""
    begun = record.last("rollout")
    if begun is None:
        return False
    plan = CanaryPlan.recorded(begun["plan"])
    is_open = any(file.may_have_moved for file in folder.of(plan))
    return is_open or any(one.blocks(plan) for one in folder.damaged())
