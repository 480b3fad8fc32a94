"""Every release leaves a model card, whatever its outcome, with the numbers of its result and no text of its data."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flows.forms.release_form import ReleaseParameters
from flows.release.record_file import ReleaseRecords
from flows.release.reports.card import CARD_FILE
from flows.release.result import ReleaseResult
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.canary_service import Refusal
from tests.support.fakes.whole_service import WholeService
from tuneship.client import ApiError
from tuneship.contract.model_card import ModelCard, model_card_schema

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
STATED, TAG, FILE = "Qcoders <b>of</b> ours", "Qtag0123456789", "Qfile0123456789"


def wanted(folder: Path, **changes: Any) -> ReleaseParameters:
    file = write(folder / "data" / f"{FILE}.jsonl", 0, 80)
    fields = release(folder, files=[str(file)]).model_dump(exclude_unset=True)
    fields |= {
        "model_card": {"users": STATED, "required": ["users"]},
        "deployment": {"tags": {TAG: TAG}},
    }
    return ReleaseParameters.model_validate(fields | changes)


def read(file: Path) -> ModelCard:
    content = file.read_bytes()
    jsonschema.validate(json.loads(content), json.loads(model_card_schema()))
    for place in (file, file.with_suffix(".md")):
        assert place.stat().st_mode & 0o777 == 0o600
        text = place.read_text()
        assert not [one for one in (TAG, FILE, "question 1", "held-out") if one in text]
    assert hashlib.sha256(content).hexdigest() in file.with_suffix(".md").read_text()
    return ModelCard.model_validate_json(content)


def card_of(result: ReleaseResult) -> ModelCard:
    card = read(Path(str(result.model_card)))
    assert card.decisions is not None
    assert (card.decisions.outcome, card.decisions.reason) == (result.outcome, result.reason)
    assert [one.model_dump() for one in card.decisions.gates] == result.training_gates
    return card


def test_a_promoted_release_states_its_numbers_and_what_people_said(
    service: WholeService, records: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    result = tune_and_deploy(wanted(tmp_path))
    assert result.outcome == "promoted"

    card, job = card_of(result), service.jobs[str(result.job_id)]
    assert (card.model.id, card.model.base_model) == (result.model, "tuneship-tiny")
    assert card.training is not None
    assert (card.training.job_id, card.training.steps) == (job["id"], 400)
    assert [one.role for one in card.data] == ["training", "validation"]
    trained_on = service.datasets[job["dataset_id"]]
    assert (card.data[0].sha256, card.data[0].examples) == (
        trained_on["tags"]["content_sha256"],
        80,
    )
    assert card.rollout is not None
    assert [one.weights for one in card.rollout.changes] == [one.weights for one in result.history]
    last = [look for look in result.decisions if look["phase"] != "settle"][-1]["gates"]["error"]
    [error] = [one for one in card.rollout.gates if one.name == "error"]
    assert (error.candidate_bad, error.candidate_requests, error.log_e_ok) == (
        last["candidate_bad"],
        last["candidate_requests"],
        last["log_e_ok"],
    )
    assert (card.statements.users, card.completeness.stated) == (STATED, 1)
    assert "Qcoders &lt;b&gt;of" in Path(str(result.model_card)).with_suffix(".md").read_text()
    assert "Qcoders" not in caplog.text + result.model_dump_json() + str(result.report)
    [record] = list(ReleaseRecords(records))
    digest = hashlib.sha256(Path(str(result.model_card)).read_bytes()).hexdigest()
    assert (record.last("model_card") or {})["sha256"] == digest
    assert "Qcoders" not in record.path.read_text()


def test_a_release_that_training_gates_refuse_has_a_card_without_a_rollout(
    service: WholeService, tmp_path: Path
) -> None:
    service.losses = lambda _: [2.0, 2.0, 2.0, 2.0]
    result = tune_and_deploy(wanted(tmp_path))
    assert (result.outcome, result.reason) == ("rejected", "training_gate")
    card = card_of(result)
    assert card.rollout is None
    assert card.training is not None


def test_a_release_that_an_error_ends_has_a_card_of_what_was_known(
    service: WholeService, records: Path, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> Any:
        raise Refusal(422, "validation_error", "no room")

    service._deploy = refuse
    with pytest.raises(ApiError):
        tune_and_deploy(wanted(tmp_path))

    [record] = list(ReleaseRecords(records))
    card = read(tmp_path / "reports" / record.path.stem / CARD_FILE)
    assert card.decisions is not None
    assert (card.decisions.outcome, card.decisions.reason) == ("aborted", "failed")
    assert card.decisions.gates
    assert card.model.id == next(iter(service.jobs.values()))["fine_tuned_model"]
