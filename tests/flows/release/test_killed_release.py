"""Releases that are killed between two requests; the kill matrix covers the moments of the requests."""

import json
from pathlib import Path

import pytest

from flows.release.record_file import ReleaseRecords
from flows.rollout.record_file import RecordFolder
from flows.shift_traffic import shift_traffic
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.conftest import plan
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tests.support.fakes.whole_service import WholeService
from tuneship.gates.record import Begun, SplitIntended

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def test_a_release_that_was_killed_after_its_promotion_takes_note_of_it(
    service: WholeService, records: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    champion = tune_and_deploy(release(tmp_path, files=[str(file)]))
    assert champion.outcome == "promoted"
    more = write(tmp_path / "data" / "b.jsonl", 100, 80)
    wanted = release(tmp_path, files=[str(more)])
    first = tune_and_deploy(wanted)
    assert first.outcome == "promoted"
    (record,) = [one for one in ReleaseRecords(records) if one.run_key == first.run_key]
    lines = record.path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["kind"] for line in lines[-2:]] == ["ended", "model_card"]
    record.path.write_text("".join(lines[:-2]))
    counts = len(service.jobs), len(service.models), len(service.patches)

    again = tune_and_deploy(wanted)

    assert again.outcome == "promoted"
    assert (again.run_key, again.model) == (first.run_key, first.model)
    assert (again.history, again.training_gates) == (first.history, first.training_gates)
    assert again.champion_validation_loss == first.champion_validation_loss is not None
    assert (len(service.jobs), len(service.models), len(service.patches)) == counts
    assert all(one.has_ended for one in ReleaseRecords(records))


def test_a_rollout_that_was_killed_before_its_first_shift_was_confirmed_finds_its_evidence(
    fake: FakeService, records: Path
) -> None:
    wanted = plan(steps=[50, 100])
    fake.make_endpoint({BASELINE: 50, CANDIDATE: 50}, lease_seconds=600)
    file = RecordFolder(records, fake.url).new(wanted)
    begun = Begun(file.path.stem, "cep_shop", wanted.model_dump(mode="json"), wanted.digest(), ())
    file.append(begun, SplitIntended(50, "first step"))

    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("promoted", "none")
    assert all(change.at is not None for change in result.history)
