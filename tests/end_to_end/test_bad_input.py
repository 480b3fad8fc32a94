"""Bad input ends a release with a clear message and exit code 1: a result file is written, nothing is created."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from flows.forms.release_form import EndpointChoice
from flows.release.endpoint_lock import endpoint_lock
from flows.release.record_file import ReleaseRecords
from tests.end_to_end.conftest import ROOT, RunningServices
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.jobs import JobStatus
from tuneship.prefect.connection import connect, disconnect

pytestmark = [pytest.mark.slow, pytest.mark.long]
PATIENCE_S = 600.0
ROWS = ROOT / "examples" / "icd10cm" / "hospital_a.jsonl"
SECRET = "the patient's own words"


def release(file: Path, **changes: Any) -> dict[str, Any]:
    data = {"files": [str(file)]}
    return {"model_name": "m", "endpoint": {"name": "bad-input"}, "data": data, **changes}


def created(services: RunningServices) -> tuple[int, int]:
    """How many datasets and how many models the service has."""
    with Client(services.settings) as client:
        datasets = client.datasets.list(limit=1).pagination.total
        return datasets, len(client.models.list(limit=100).models)


def refused(
    services: RunningServices, folder: Path, parameters: dict[str, Any], **changes: str
) -> str:
    """Run a release that must be refused, check what all refusals have in common, and return its message."""
    before = created(services)
    code, said, result = services.release(folder, parameters, **changes)
    assert (code, result["outcome"]) == (1, "aborted"), said
    assert "Traceback" not in said
    assert created(services) == before
    return said


def test_a_line_of_the_data_is_named_by_number_field_and_code_never_by_its_text(
    services: RunningServices, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    good = json.dumps({"instruction": "a", "response": "b"})
    file.write_text(f'{good}\n{json.dumps({"instruction": SECRET})}\n{{"x": "{SECRET}"\n')
    said = refused(services, tmp_path, release(file))
    assert "line 2, response: missing_field" in said
    assert "line 3, line: invalid_json" in said
    assert SECRET not in said


def test_a_data_file_that_does_not_exist_is_named(
    services: RunningServices, tmp_path: Path
) -> None:
    said = refused(services, tmp_path, release(tmp_path / "none.jsonl"))
    assert "none.jsonl: no such file" in said


def test_an_unknown_key_is_named(services: RunningServices, tmp_path: Path) -> None:
    said = refused(services, tmp_path, release(ROWS, learning_rat=0.1))
    assert "learning_rat: is not a known key (did you mean hyperparameters.learning_rate?)" in said


def test_prompts_that_do_not_exist_are_refused_before_anything_is_made(
    services: RunningServices, tmp_path: Path
) -> None:
    traffic = {"prompts": str(tmp_path / "none.jsonl"), "requests_per_second": 1}
    said = refused(services, tmp_path, release(ROWS, canary={"traffic": traffic}))
    assert "none.jsonl" in said


def test_an_unknown_base_model_is_refused_without_waiting_for_another_release(
    services: RunningServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = release(ROWS, base_model="no-such-model")
    monkeypatch.setenv("TUNESHIP_RECORDS", services.environment["TUNESHIP_RECORDS"])
    connect(services.settings)
    try:
        with endpoint_lock(EndpointChoice.model_validate(wanted["endpoint"])):
            code, said, result = services.release(tmp_path, wanted)
    finally:
        disconnect()
    assert (code, result["reason"]) == (1, "model_not_found"), said
    assert "the base models are tuneship-tiny" in said
    assert "Traceback" not in said


def test_a_wrong_key_is_reported(services: RunningServices, tmp_path: Path) -> None:
    said = refused(services, tmp_path, release(ROWS), TUNESHIP_API_KEY="tsk_wrong")
    assert "authentication_error" in said


def test_a_service_that_does_not_answer_is_reported(
    services: RunningServices, tmp_path: Path
) -> None:
    said = refused(services, tmp_path, release(ROWS), TUNESHIP_URL="http://127.0.0.1:9")
    assert "no answer" in said


def test_a_call_without_parameters_is_answered_with_how_it_goes(services: RunningServices) -> None:
    run = services.start("flows/tune_and_deploy.py")
    _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "--params" in said


def test_ctrl_c_while_training_cancels_the_job(services: RunningServices, tmp_path: Path) -> None:
    params, result = tmp_path / "release.json", tmp_path / "result.json"
    params.write_text(json.dumps(release(ROWS, hyperparameters={"epochs": 100})))
    run = services.start(
        "flows/tune_and_deploy.py", "--params", str(params), "--result", str(result)
    )
    records = ReleaseRecords(Path(services.environment["TUNESHIP_RECORDS"]))
    until(lambda: _jobs(records) or run.poll() is not None, PATIENCE_S)
    run.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.send_signal(signal.SIGINT)  # a second one must not break the clean-up
    _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, said
    written = json.loads(result.read_text())
    assert (written["outcome"], written["reason"]) == ("aborted", "cancelled")
    decided = json.loads(Path(written["model_card"]).read_text())["decisions"]
    assert (decided["outcome"], decided["reason"]) == ("aborted", "cancelled")
    with Client(services.settings) as client:
        status = client.jobs.get(_jobs(records)[0]).status
    assert status in (JobStatus.CANCELLING, JobStatus.CANCELLED)


def _jobs(records: ReleaseRecords) -> list[str]:
    return [job for record in records for job in record.all_made("job")]
