"""A retraining runs when there is new data, chooses what to train on, and says why it was skipped otherwise."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from flows.forms.release_form import EndpointChoice, ReleaseParameters
from flows.forms.retrain_form import Skipped
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.release.result import ReleaseResult
from flows.retrain import retrain
from tests.support.fakes.canary_service import ENDPOINT
from tests.support.fakes.whole_service import WholeService

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
ROW = '{{"instruction": "question {}", "response": "answer"}}\n'


def write(file: Path, first: int, count: int) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(ROW.format(number) for number in range(first, first + count)))
    return file


def release(folder: Path, **data: Any) -> ReleaseParameters:
    held_out = write(folder / "held-out" / "validation.jsonl", 10_000, 60)
    return ReleaseParameters.model_validate(
        {
            "model_name": "m",
            "data": {"validation_file": str(held_out), **data},
            "endpoint": {"name": "shop"},
            "evaluation": {"max_examples": 0},
            "canary": {
                "steps": [50, 100],
                "look_every_seconds": 0.05,
                "bake_looks": 2,
                "latency_gates": None,
                "quality_gates": None,
            },
        }
    )


def ended(result: ReleaseResult | Skipped) -> str:
    """Outcome and reason, as a failed assertion should show them."""
    return f"{result.outcome} ({result.reason})"


def trained_on(service: WholeService) -> list[int]:
    """The number of training examples of every job, in order."""
    return [service.datasets[job["dataset_id"]]["num_examples"] for job in service.jobs.values()]


def test_it_trains_when_there_is_new_data_and_skips_with_a_reason_when_there_is_none(
    service: WholeService, tmp_path: Path, records: Path
) -> None:
    folder = tmp_path / "data"
    write(folder / "week-1.jsonl", 0, 80)
    wanted = release(tmp_path, files=[f"{folder}/*.jsonl"])
    (records / "releases").mkdir(parents=True)
    (records / "releases" / "damaged-1.jsonl").write_bytes(b"\xff garbage\nhalf a li")

    first = retrain(wanted)
    assert isinstance(first, ReleaseResult)
    assert (first.outcome, service.serving()) == ("promoted", first.model)

    state = retrain(wanted, return_state=True)
    assert (state.type, state.name) == (StateType.COMPLETED, "Skipped")
    assert "nothing is newer" in str(state.message)
    by_id = wanted.model_copy(update={"endpoint": EndpointChoice(id=ENDPOINT)})
    assert skipped(by_id) == "no_new_data"
    assert len(list((records / "turns").glob("*.lock"))) == 1, (
        "one endpoint is one turn, by id or name"
    )
    assert len(service.jobs) == 1

    write(folder / "week-2.jsonl", 100, 40)
    second = retrain(wanted)
    assert isinstance(second, ReleaseResult)
    assert ended(second) == "promoted (none)"
    assert second.champion_model == first.model, "the champion is what the endpoint serves"
    assert trained_on(service) == [80, 120]

    write(folder / "week-3.jsonl", 200, 30)
    assert ended(retrain(wanted, "what is new")) == "promoted (none)"
    assert trained_on(service) == [80, 120, 30]


def skipped(wanted: ReleaseParameters, **how: Any) -> str:
    result = retrain(wanted, **how)
    assert isinstance(result, Skipped), ended(result)
    return result.reason


def test_a_release_with_no_or_too_little_new_data_is_skipped(
    service: WholeService, tmp_path: Path
) -> None:
    assert skipped(release(tmp_path, files=[f"{tmp_path}/none/*.jsonl"])) == "no_data"
    file = write(tmp_path / "data" / "few.jsonl", 0, 80)
    few = release(tmp_path, files=[str(file)])
    assert skipped(few, minimum_new_examples=81) == "too_little_new_data"
    assert service.jobs == {}


@pytest.mark.soak
def test_datasets_of_the_service_are_found_by_their_tags(
    service: WholeService, tmp_path: Path
) -> None:
    mine = service.add_dataset("mine", 80, use="shop")
    other = service.add_dataset("other", 80, use="support")
    wanted = release(tmp_path, dataset_tags={"use": "shop"})

    assert skipped(wanted, dataset_id=other["id"]) == "dataset_is_not_for_this"
    assert ended(retrain(wanted, dataset_id=mine["id"])) == "promoted (none)"
    assert trained_on(service) == [80]
    assert skipped(wanted, dataset_id=mine["id"]) == "no_new_data"
    # A dataset that the retraining itself uploads or merges starts no further run, even with inherited tags.
    merged = service.add_dataset("both", 160, source=[mine["id"], other["id"]], use="shop")
    assert skipped(wanted, dataset_id=merged["id"]) == "dataset_is_not_for_this"


@pytest.mark.soak
def test_without_records_the_age_of_the_serving_model_decides(
    service: WholeService, tmp_path: Path, records: Path
) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    wanted = release(tmp_path, files=[str(file)])
    assert ended(retrain(wanted)) == "promoted (none)"
    for one in ReleaseRecords(records):
        one.path.unlink()

    trained = next(iter(service.jobs.values()))["created_at"]
    before = datetime.fromisoformat(trained) - timedelta(days=1)
    os.utime(file, (before.timestamp(), before.timestamp()))
    assert skipped(wanted) == "no_new_data"

    now = datetime.now(UTC).timestamp()
    os.utime(file, (now, now))
    assert ended(retrain(wanted)) == "promoted (none)"


def test_a_release_that_was_refused_is_no_success(service: WholeService, tmp_path: Path) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    wanted = release(tmp_path, files=[str(file)])
    service.losses = lambda _: [2.0, 2.0, 2.0, 2.0]
    assert retrain(wanted).outcome == "rejected"

    service.losses = lambda _: [2.0, 1.5, 1.2, 1.0]
    assert ended(retrain(wanted)) == "promoted (none)"


def test_the_record_is_found_by_the_run_that_called_the_chain(
    service: WholeService, tmp_path: Path, records: Path
) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    state = retrain(release(tmp_path, files=[str(file)]), return_state=True)
    run_id = str(state.state_details.flow_run_id)
    found = ReleaseRecords(records).of_flow_run(run_id)
    assert isinstance(found, ReleaseRecord), "a hook that knows only the outer run cleans up"
