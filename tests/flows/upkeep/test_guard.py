"""The guard returns abandoned traffic and never touches anything else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flows.guard import guard
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.rollout.record_file import RecordFile, RecordFolder
from flows.rollout.result import RollbackIncomplete
from flows.shift_traffic import shift_traffic
from flows.upkeep.guard_form import GuardResult, GuardRules
from tests.flows.conftest import PATIENCE_S, SCRIPT, Script, plan, slow_plan, use, wait_for
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Begun, SplitConfirmed, SplitIntended

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
LONG = {"min_looks_per_step": 10_000, "max_looks_per_step": 10_000, "max_looks": 10_000}
AT_ONCE = GuardRules(silence_seconds=0)
RETURNED = {BASELINE: 100, CANDIDATE: 0}


def left_at(
    service: FakeService, records: Path, weight: int, wanted: CanaryPlan | None = None
) -> RecordFile:
    """Leave on disk and at the service what a run leaves that died an hour ago at this weight."""
    wanted = wanted or plan()
    service.make_endpoint({BASELINE: 100 - weight, CANDIDATE: weight}, lease_seconds=600)
    if service.endpoint and service.extensions:
        service.endpoint["lease"]["fallback"] = [{"id": BASELINE, "traffic_percentage": 100}]
    file = RecordFolder(records, service.url).new(wanted)
    server = () if service.extensions else ("versions",)
    begun = Begun(
        file.path.stem,
        "cep_shop",
        wanted.model_dump(mode="json"),
        wanted.digest(),
        (),
        server=server,
    )
    file.append(begun, SplitIntended(weight, "first step"), SplitConfirmed(weight))
    age(file.path, hours=1)
    return file


def age(file: Path, **since: float) -> None:
    at = (datetime.now(UTC) - timedelta(**since)).timestamp()
    os.utime(file, (at, at))


def ends(result: GuardResult) -> list[tuple[str, str]]:
    return [(one.outcome, one.reason) for one in result.rollouts]


def test_a_run_that_was_killed_in_mid_shift_gets_its_traffic_returned(
    fake: FakeService, run: Callable[[CanaryPlan], Script]
) -> None:
    script = run(slow_plan(steps=[50, 100], **LONG))
    wait_for(lambda: fake.weights.get(CANDIDATE) == 50)
    alive = guard(AT_ONCE)
    assert (alive.outcome, alive.rollouts) == ("nothing_to_do", [])

    script.process.kill()
    script.process.wait()
    assert fake.weights[CANDIDATE] == 50
    too_soon = guard(GuardRules(silence_seconds=3600))
    wait_for(lambda: ends(guard(AT_ONCE)) == [("aborted", "abandoned")])

    assert too_soon.outcome == "nothing_to_do"
    assert fake.weights == RETURNED
    assert fake.endpoint is not None
    assert fake.endpoint["lease"] is None
    assert fake.deleted == []
    changes = len(fake.patches)
    assert guard(AT_ONCE).outcome == "nothing_to_do"
    assert len(fake.patches) == changes


def test_a_new_rollout_of_the_same_plan_begins_after_the_guard(
    fake: FakeService, records: Path
) -> None:
    left_at(fake, records, 50)
    guard()
    assert shift_traffic(plan()).outcome == "promoted"


def test_a_server_without_extensions_is_given_the_baseline(
    prefect_api: None, records: Path
) -> None:
    with FakeService(extensions=False) as bare:
        use(bare)
        left_at(bare, records, 25)
        assert ends(guard()) == [("aborted", "abandoned")]
        assert bare.weights == RETURNED
        assert guard().outcome == "nothing_to_do"


def test_a_promoted_endpoint_is_never_touched(fake: FakeService) -> None:
    assert shift_traffic(plan(steps=[50, 100])).outcome == "promoted"
    changes = len(fake.patches)

    assert guard(AT_ONCE).outcome == "nothing_to_do"
    assert len(fake.patches) == changes
    assert fake.weights[CANDIDATE] == 100


def test_a_rollout_that_died_in_its_bake_is_returned(fake: FakeService, records: Path) -> None:
    left_at(fake, records, 100)
    assert ends(guard()) == [("aborted", "abandoned")]
    assert fake.weights == RETURNED


def test_a_rollout_that_died_after_its_bake_stays_promoted(
    fake: FakeService, run: Callable[[CanaryPlan], Script], records: Path
) -> None:
    wanted = slow_plan(steps=[50, 100], look_every_seconds=0.05)
    assert shift_traffic(wanted).outcome == "promoted"
    (file,) = RecordFolder(records, fake.url).of(wanted)
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join(lines[:-1]))  # killed before it recorded its end
    age(file.path, hours=1)

    assert ends(guard()) == [("promoted", "none")]
    assert fake.weights[CANDIDATE] == 100


def test_traffic_that_the_lease_has_returned_is_only_recorded(
    fake: FakeService, records: Path
) -> None:
    left_at(fake, records, 50)
    fake.revert()

    assert ends(guard()) == [("rolled_back", "lease_expired")]
    assert fake.patches == []


def test_a_split_that_somebody_else_set_is_left_alone(fake: FakeService, records: Path) -> None:
    left_at(fake, records, 50)
    theirs = {BASELINE: 60, CANDIDATE: 40}
    fake.change_from_outside(theirs)

    assert ends(guard()) == [("aborted", "foreign_change")]
    assert fake.weights == theirs
    assert guard().outcome == "nothing_to_do"


def test_an_old_record_never_undoes_a_later_rollout_even_where_nothing_can_be_read(
    prefect_api: None, records: Path
) -> None:
    with FakeService(extensions=False) as bare:
        use(bare)
        left_at(bare, records, 25, plan(candidate_deployment_id="dep_earlier"))
        bare.endpoint = None
        later = plan(steps=[50, 100], quality_gates=None, retire_baseline=False)
        assert shift_traffic(later).outcome == "promoted"

        assert ends(guard()) == [("aborted", "foreign_change")]
        assert bare.weights[CANDIDATE] == 100


def test_a_pause_is_returned_only_after_the_time_that_a_person_has(
    fake: FakeService, records: Path
) -> None:
    fake.silent[CANDIDATE] = "zeros"
    paused = plan(
        max_looks_per_step=6,
        wait_for_traffic="0s",
        on_inconclusive="pause",
        approval_timeout_seconds=5000,
    )
    assert shift_traffic(paused).outcome == "paused"
    (file,) = RecordFolder(records, fake.url).of(paused)

    age(file.path, seconds=4900)
    assert guard().outcome == "nothing_to_do"
    age(file.path, seconds=5100)
    assert ends(guard()) == [("rolled_back", "approval_timeout")]
    assert fake.weights == RETURNED


def test_traffic_that_cannot_be_returned_fails_the_run_and_is_tried_again(
    fake: FakeService, records: Path
) -> None:
    file = left_at(fake, records, 25)
    fake.patch_script = ["fail"] * 12
    with pytest.raises(RollbackIncomplete):
        guard(AT_ONCE)

    fake.patch_script = []
    age(file.path, hours=1)
    assert ends(guard()) == [("rolled_back", "abandoned")]
    assert fake.weights == RETURNED


def test_a_damaged_record_is_named_and_stops_nothing(fake: FakeService, records: Path) -> None:
    file = left_at(fake, records, 25)
    (file.path.parent / "rollout-0000-0001.jsonl").write_text("{}\n{}\n")

    result = guard()

    assert ends(result) == [("aborted", "abandoned")]
    damaged = file.path.parent / "rollout-0000-0001.jsonl"
    assert result.notes == [f"the record {damaged} cannot be read in line 1, 2"]


def released(records: Path, service: FakeService, **age_of_it: float) -> ReleaseRecord:
    """The record of a release that died after it had made its candidate."""
    record = ReleaseRecords(records).of("d" * 64, None)
    now = datetime.now(UTC)
    where = {"endpoint_id": None, "endpoint_name": "shop", "service": service.url}
    record.add("begun", now, run_key="k", flow_run_id="f", **where)
    record.add("candidate", now, id=CANDIDATE)
    parameters = {"model_name": "m", "model": "ft:m", "endpoint": {"name": "shop"}}
    record.parameters_file.write_text(json.dumps(parameters))
    age(record.path, **age_of_it)
    return record


def test_a_release_that_nobody_went_on_with_gives_its_candidate_away(
    fake: FakeService, records: Path
) -> None:
    fake.make_endpoint(RETURNED)
    record = released(records, fake, hours=30)

    result = guard()

    assert (result.outcome, result.releases) == ("returned", ["k"])
    assert fake.deleted == [CANDIDATE]
    assert ReleaseRecord(record.path).has_ended
    assert guard().outcome == "nothing_to_do"


def test_a_release_that_may_still_go_on_is_left_alone(fake: FakeService, records: Path) -> None:
    fake.make_endpoint(RETURNED)
    record = released(records, fake, hours=20)
    assert guard().outcome == "nothing_to_do"

    age(record.path, hours=30)
    assert record.hold(), "its run lives"
    assert guard().outcome == "nothing_to_do"
    record.release()
    assert fake.deleted == []


def test_a_damaged_release_is_named_and_stops_nothing(fake: FakeService, records: Path) -> None:
    fake.make_endpoint(RETURNED)
    released(records, fake, hours=30)
    damaged = records / "releases" / "0000-1.jsonl"
    damaged.write_text('{"kind": "begun"}\na prompt\n')

    result = guard()

    assert (result.outcome, result.releases) == ("returned", ["k"])
    (note,) = result.notes
    assert str(damaged) in note
    assert "line 1, 2" in note
    assert "prompt" not in note
    assert guard().notes == [note]


def test_a_release_of_another_service_is_left_alone(fake: FakeService, records: Path) -> None:
    record = released(records, fake, hours=30)
    record.path.write_text(record.path.read_text().replace(fake.url, "http://elsewhere"))
    age(record.path, hours=30)
    assert guard().outcome == "nothing_to_do"


def test_as_a_script_it_needs_no_parameters_and_exits_with_0(
    fake: FakeService, records: Path, script_environment: dict[str, str], tmp_path: Path
) -> None:
    left_at(fake, records, 25)
    result_file = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT.with_name("guard.py")), "--result", str(result_file)]

    ended = subprocess.run(
        command, env=script_environment, capture_output=True, timeout=PATIENCE_S, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert json.loads(result_file.read_text())["outcome"] == "returned"
    assert fake.weights == RETURNED
