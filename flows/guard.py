"""Cleans up after dead runs: returns the traffic of abandoned rollouts, deletes jobs and deployments of abandoned
releases.

Then `flows/upkeep/watch.py` watches the promoted deployments; it reports those that became worse, and moves nothing.

Safe at any time and as often as one likes: a rollout whose driver lives, one that was promoted, and a split that
somebody else set are never touched. Runs every two minutes from `prefect.yaml`, at a worker's start, or by hand:
`python flows/guard.py`. Rules: `flows/rollout/abandoned.py`.
"""

import sys
from pathlib import Path

if (
    __name__ == "__main__"
):  # a script finds its modules in the project's folder, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flows  # noqa: F401  # pyright: ignore[reportUnusedImport] - first: Prefect looks at its telemetry setting when imported

# isort: split
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from prefect import flow, get_run_logger

from flows.release.abandoned import close_abandoned
from flows.release.record_file import ReleaseRecords
from flows.rollout.abandoned import GuardView, finish_abandoned
from flows.rollout.record_file import RecordFolder, records_in_use
from flows.rollout.result import RollbackIncomplete
from flows.shared.release_events import publish_left
from flows.upkeep.guard_form import GuardResult, GuardRules
from flows.upkeep.watch import watch_endpoints
from tuneship.contract.common import count
from tuneship.prefect.connection import service_name
from tuneship.settings import PipelineSettings

DEFAULTS = GuardRules()


@flow(name="guard")
def guard(rules: GuardRules = DEFAULTS) -> GuardResult:
    """End every abandoned rollout and release. Raises `RollbackIncomplete` where traffic could not be returned."""
    log, now = get_run_logger(), datetime.now(UTC)
    settings = PipelineSettings()
    folder = records_in_use()
    silence = timedelta(seconds=rules.silence_seconds)
    rollouts, notes = finish_abandoned(GuardView(folder, now, silence, log))
    silence = timedelta(hours=rules.release_silence_hours)
    releases, kept = close_abandoned(GuardView(folder, now, silence, log), settings.records)
    publish_left(_own_records(folder, settings.records), datetime.now(UTC))
    watch = GuardView(folder, now, silence, log)
    alarms, unwatched = watch_endpoints(watch, settings.records) if rules.watch else ([], [])
    result = GuardResult(
        outcome="returned" if rollouts or releases else "nothing_to_do",
        rollouts=rollouts,
        releases=releases,
        alarms=alarms,
        notes=notes + kept + unwatched,
    )
    for note in result.notes:
        log.warning(note)
    stuck = [one.rollout_id for one in rollouts if one.outcome == "rollback_incomplete"]
    if stuck:
        failed = result.model_copy(
            update={"outcome": "rollback_incomplete", "reason": ", ".join(stuck)}
        )
        raise RollbackIncomplete(failed, f"not returned: {', '.join(stuck)}")
    log.info(
        "%s: %s, %s, %s",
        result.outcome,
        count(len(rollouts), "rollout"),
        count(len(releases), "release"),
        count(len(alarms), "alarm"),
    )
    return result


def _own_records(folder: RecordFolder, records: Path) -> Iterator[Path]:
    """The files of all rollouts and releases at this service."""
    yield from folder.paths()
    for record in ReleaseRecords(records):
        if (record.last("begun") or {}).get("service") == service_name():
            yield record.path


if __name__ == "__main__":
    from flows.script.main import run_script

    run_script(guard, GuardRules, "Return the traffic of rollouts whose run is gone.")
