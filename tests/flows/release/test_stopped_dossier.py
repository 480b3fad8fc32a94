"""A release that was stopped has a dossier, too: its result is made from the records that it left."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.forms.release_form import ReleaseParameters
from flows.release.record_file import ReleaseRecords
from flows.release.release_run import result_when_stopped
from tests.unit.gates.test_training_gates import CHAMPION, JOB, RULES, metrics
from tuneship.dossier.archive import pack
from tuneship.dossier.checks import verify
from tuneship.dossier.contents import MANIFEST, gather, made_here, written_manifest
from tuneship.gates.training.training_record import TrainingRecord

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_release_that_was_stopped_before_its_rollout_has_a_dossier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_judged: bool
) -> None:
    monkeypatch.setenv("TUNESHIP_RECORDS", str(tmp_path))
    monkeypatch.setenv("TUNESHIP_REPORTS", str(tmp_path / "reports"))
    release = ReleaseParameters.model_validate(
        {"model_name": "notes", "endpoint": {"id": "cep_1"}, "model": "ft:notes"}
    )
    record = ReleaseRecords(tmp_path).of(release.digest(), None)
    record.add("begun", NOW, run_key="key", endpoint_id="cep_1", endpoint_name=None)
    record.add("job", NOW, id="ft_1", content=["x"])
    judged = TrainingRecord(JOB, metrics(), CHAMPION, RULES)
    if is_judged:
        record.training_file.write_text(judged.to_json())
    record.add("ended", NOW, outcome="aborted", reason="stopped")

    result = result_when_stopped(release)

    assert result is not None
    assert (result.outcome, result.reason, result.job_id) == ("aborted", "cancelled", "ft_1")
    assert len(result.training_gates) == (len(judged.decide().gates) if is_judged else 0)
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result.model_dump(mode="json")))
    members = gather(file, None)
    found = verify(pack(members | {MANIFEST: written_manifest(members, made_here())}))
    assert found.problems == []
    assert found.decided == ([f"{len(result.training_gates)} training gates"] if is_judged else [])
