"""A release compares its model with the champion row by row, as far as the server can."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.release.result import ReleaseResult
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.release.test_candidates import RATES, tried
from tests.flows.release.test_retrain import ended, release, write
from tests.support.fakes.whole_service import WholeService

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
ROWS = 60


def released(folder: Path, number: int, **data: Any) -> ReleaseResult:
    file = write(folder / "data" / f"{number}.jsonl", 100 * number, 80)
    return tune_and_deploy(release(folder, files=[str(file)], **data))


def gates(result: ReleaseResult) -> dict[str, tuple[str, str]]:
    return {
        gate["name"].split()[0]: (gate["state"], gate["note"]) for gate in result.training_gates
    }


def by_row(served: float) -> Any:
    """Publish rows whose losses fall from 2 to `served`; the compared model has 1."""

    def publish(job: Mapping[str, Any]) -> dict[str, Any]:
        model = job["comparison"].get("model")
        noise = [0.01 * (number % 5) for number in range(ROWS)]
        return {
            "rows": list(range(1, ROWS + 1)),
            "judge": [number % 2 == 0 for number in range(ROWS)],
            "trained_on": [False] * ROWS,
            "start": [2.0] * ROWS,
            "served": [served + one for one in noise],
            "compared": [1.0] * ROWS if model else None,
            "compared_model": model,
        }

    return publish


def test_the_champion_is_measured_now_on_the_rows_of_this_release(
    service: WholeService, tmp_path: Path
) -> None:
    service.row_losses = by_row(served=0.98)
    first = released(tmp_path, 1)
    assert ended(first) == "promoted (none)"
    assert (gates(first)["T4"][0], gates(first)["T9"][0]) == ("not_available", "pass")
    write(tmp_path / "held-out" / "other.jsonl", 20_000, 60)
    other = {"validation_file": str(tmp_path / "held-out" / "other.jsonl")}
    second = released(tmp_path, 2, **other)
    assert ended(second) == "promoted (none)"
    assert gates(second)["T4"][0] == "pass"

    comparisons = [job["comparison"] for job in service.jobs.values()]
    assert [one.get("model") for one in comparisons] == [None, first.model]
    assert comparisons[0]["seed"] != comparisons[1]["seed"], "other rows judge in each release"

    # The mean losses are the same as before: the rows alone show that it is worse.
    service.row_losses = by_row(served=1.2)
    third = released(tmp_path, 3)
    assert (ended(third), third.gate) == ("rejected (training_gate)", "T4 champion")

    # Too little traffic is said before anything is trained.
    service.requests_per_bucket = 1
    service.tick(90)
    wanted = release(tmp_path, files=[str(write(tmp_path / "data" / "4.jsonl", 400, 80))])
    hurried = wanted.canary.model_copy(update={"wait_for_traffic": "1m", "max_looks_per_step": 5})
    fourth = tune_and_deploy(wanted.model_copy(update={"canary": hurried}))
    assert ended(fourth) == "rejected (too_little_traffic)"
    assert len(service.jobs) == len(comparisons) + 1


def test_all_settings_of_a_release_are_judged_by_the_same_half(
    service: WholeService, tmp_path: Path
) -> None:
    assert tune_and_deploy(tried(tmp_path, *RATES)).outcome == "promoted"
    assert len({job["comparison"]["seed"] for job in service.jobs.values()}) == 1


def test_a_champion_whose_model_is_gone_is_compared_by_its_mean_loss(
    service: WholeService, tmp_path: Path
) -> None:
    first = released(tmp_path, 1)
    service.deleted_models.add(str(first.model))
    second = released(tmp_path, 2)
    assert ended(second) == "promoted (none)"
    assert not list(service.jobs.values())[-1]["comparison"].get("model")
    assert "publishes no losses by row" in gates(second)["T4"][1]


@pytest.mark.soak
def test_few_measurements_are_warned_of_before_the_training(
    service: WholeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    wanted = release(tmp_path, files=[str(file)]).model_dump(exclude_unset=True)
    seldom = wanted | {"validation_frequency": 1, "hyperparameters": {"epochs": 1}}
    often = wanted | {"validation_frequency": 2, "hyperparameters": {"epochs": 1, "batch_size": 8}}
    for fields, expected in ((seldom, 1), (often, 0)):
        caplog.clear()
        tune_and_deploy(type(release(tmp_path, files=[str(file)])).model_validate(fields))
        warned = [line for line in caplog.messages if line.startswith("validation_frequency: ")]
        assert len(warned) == expected
