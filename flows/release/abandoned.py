"""Closes abandoned releases: stops their job, deletes their deployment, ends their record.

Until then a run with the same parameters resumes where the dead one stopped. The rules are those of
`flows/release/closing.py`.
"""

from datetime import UTC, datetime
from pathlib import Path

from flows.release.closing import close
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.rollout.abandoned import GuardView
from tuneship.client import TuneshipError
from tuneship.gates.plan import CanaryPlan
from tuneship.prefect.connection import service_name


def close_abandoned(watch: GuardView, records: Path) -> tuple[list[str], list[str]]:
    """Close abandoned releases. Returns their run keys, and notes on what was kept and why."""
    closed: list[str] = []
    notes: list[str] = []
    for record in ReleaseRecords(records):
        try:
            if record.damage:
                notes.append(record.damage)
            # A silent run may still be training; only the end of its process releases its lock.
            elif _is_abandoned(record, watch) and record.hold():
                try:
                    notes += close(record, "abandoned")
                finally:
                    record.release()
                closed.append(record.run_key)
        except TuneshipError as error:
            notes.append(f"the release {record.run_key} is left as it is ({type(error).__name__})")
        except Exception as error:  # no single record may stop the others
            watch.log.exception("the release %s is left as it is", record.run_key)
            notes.append(f"the release {record.run_key} is left as it is ({type(error).__name__})")
    return closed, notes


def _is_abandoned(record: ReleaseRecord, watch: GuardView) -> bool:
    begun = record.last("begun")
    if begun is None or record.has_ended or begun.get("service") != service_name():
        return False
    written = datetime.fromtimestamp(record.path.stat().st_mtime, UTC)
    if watch.now - written <= watch.silence:
        return False
    # While its rollout is alive, paused for a person, or unreadable, the candidate may be in use.
    rollout = record.last("rollout")
    if rollout is None:
        return True
    plan = CanaryPlan.model_validate(rollout["plan"])
    is_open = any(file.may_have_traffic for file in watch.folder.of(plan))
    return not is_open and not any(one.blocks(plan) for one in watch.folder.damaged())
