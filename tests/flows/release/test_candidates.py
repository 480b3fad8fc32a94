"""Several sets of hyperparameters are trained side by side; the best goes on and the others are named."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from flows.forms.release_form import ReleaseParameters
from flows.release.loss_limits import Limit
from flows.release.reports.report import report
from flows.release.reports.training_page import TrainingPage
from flows.release.training import best_of
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.whole_service import WholeService
from tuneship.contract.jobs import Job, JobMetrics
from tuneship.prefect import waits

MOMENT = "2026-01-05T08:00:00Z"


def tried(folder: Path, *sets: dict[str, Any], **changes: Any) -> ReleaseParameters:
    file = write(folder / "data" / "a.jsonl", 0, 80)
    wanted = release(folder, files=[str(file)]).model_dump(exclude_unset=True)
    fields = {"hyperparameters": {"epochs": 2}, "hyperparameter_sets": list(sets)}
    return ReleaseParameters.model_validate(wanted | fields | changes)


RATES = ({"learning_rate": 0.01}, {"learning_rate": 0.001}, {"learning_rate": 0.0001})
LOWEST = {0.01: 1.4, 0.001: 0.9, 0.0001: 1.2}


def by_rate(hyperparameters: Any) -> list[float]:
    lowest = LOWEST[hyperparameters["learning_rate"]]
    return [2.0, 1.6, (1.6 + lowest) / 2, lowest]


@pytest.mark.prefect
@pytest.mark.slow
def test_the_best_by_validation_loss_goes_on_and_the_others_are_named(
    service: WholeService, tmp_path: Path
) -> None:
    service.losses = by_rate
    wanted = tried(tmp_path, *RATES)

    result = tune_and_deploy(wanted)

    assert result.outcome == "promoted"
    assert [job["hyperparameters"]["epochs"] for job in service.jobs.values()] == [2, 2, 2]
    contenders = {one.hyperparameters["learning_rate"]: one for one in result.contenders}
    assert [one.is_best for one in contenders.values()] == [False, True, False]
    assert {rate: one.validation_loss for rate, one in contenders.items()} == LOWEST
    assert (result.model, service.serving()) == (contenders[0.001].model, contenders[0.001].model)
    assert set(contenders[0.001].hyperparameters) == {"learning_rate"}, (
        "what they have in common is not said"
    )
    text = report(result, wanted, [])
    assert all(one.job_id in text for one in result.contenders)


@pytest.mark.prefect
@pytest.mark.slow
def test_one_that_diverges_or_fails_is_stopped_and_does_not_stop_the_others(
    service: WholeService, tmp_path: Path
) -> None:
    service.polls_to_end = 12  # after two looks at their metrics, one every five polls
    service.losses = lambda chosen: (
        [2.0, float("nan"), float("nan"), float("nan")]
        if chosen["learning_rate"] == 0.01
        else by_rate(chosen)
    )
    service.status = lambda chosen: "failed" if chosen["learning_rate"] == 0.0001 else "completed"

    result = tune_and_deploy(tried(tmp_path, *RATES))

    states = {one.hyperparameters["learning_rate"]: one.status for one in result.contenders}
    assert states == {0.01: "cancelled", 0.001: "completed", 0.0001: "failed"}
    assert result.outcome == "promoted"


@pytest.mark.prefect
@pytest.mark.slow
def test_a_release_that_stops_while_they_train_cancels_all_of_them(
    service: WholeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.polls_to_end = 10_000

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # Replaced only for the waiting release, because Prefect's client and the fake may sleep meanwhile.
    monkeypatch.setattr(
        "tuneship.prefect.waits.time", SimpleNamespace(sleep=stop, monotonic=time.monotonic)
    )
    with pytest.raises(BaseException):  # noqa: B017 - however Prefect wraps the interruption
        tune_and_deploy(tried(tmp_path, *RATES))

    assert {job["status"] for job in service.jobs.values()} == {"cancelled"}
    assert len(service.jobs) == 3


def test_sets_take_what_they_leave_out_from_the_common_ones_and_must_differ(
    tmp_path: Path,
) -> None:
    wanted = tried(tmp_path, *RATES[:2])
    assert [(one.learning_rate, one.epochs) for one in wanted.settings] == [(0.01, 2), (0.001, 2)]
    with pytest.raises(ValueError, match="must differ"):
        tried(tmp_path, {"epochs": 2}, {})
    with pytest.raises(ValueError, match="at most 10"):
        tried(tmp_path, *({"learning_rate": 0.001 * n} for n in range(1, 12)))


def job(status: str) -> Job:
    return Job.model_validate(
        {
            "id": "ft_1",
            "base_model": "b",
            "dataset_id": "ds_1",
            "fine_tuning_method": "lora",
            "model_name": "m",
            "status": status,
            "created_at": MOMENT,
            "updated_at": MOMENT,
            "validation_frequency": 1,
            "hyperparameters": {},
            "compute_config": {},
        }
    )


def measured(*validation: float | None) -> JobMetrics:
    nothing = [None] * len(validation)
    return JobMetrics.model_validate(
        {
            "job_id": "ft_1",
            "steps": list(range(1, len(validation) + 1)),
            "validation_loss": list(validation),
            "created_at": MOMENT,
            **dict.fromkeys(
                ("training_loss", "learning_rate", "epochs", "accuracy", "perplexity"), nothing
            ),
        }
    )


@pytest.mark.parametrize(
    ("states", "losses", "best"),
    [
        (["completed", "completed"], [(2.0, 1.0), (2.0, 0.5)], 1),
        (["completed", "failed"], [(2.0, 1.0), (2.0, 0.5)], 0),
        (["failed", "completed"], [(2.0,), (None,)], 1),
        (["failed", "cancelled"], [(0.1,), (0.2,)], 0),
        (["completed", "completed"], [(1.0,), (1.0,)], 0),
    ],
)
def test_which_job_is_the_best(
    states: list[str], losses: list[tuple[float | None, ...]], best: int
) -> None:
    assert best_of([job(one) for one in states], [measured(*one) for one in losses]) == best


def test_the_page_shows_every_job_with_its_picture() -> None:
    page = TrainingPage([Limit("T9 first model", 0.9)])
    page._known = {"ft_1": measured(2.0, 2.0, 1.5), "ft_2": measured(None)}
    text = page.page()
    assert "| ft_1 | 3 | - | - | 1.5 | 1.5 |" in text
    assert "| ft_2 | 1 | - | - | - | - |" in text
    assert text.count("data:image/png") == 2


def test_a_prefect_server_that_is_away_stops_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError("away"), uuid4(), OSError("away"), uuid4()]
    asked: list[float] = []

    def prefect(*_: Any, progress: float, **__: Any) -> Any:
        asked.append(progress)
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    for name in ("create_progress_artifact", "update_progress_artifact"):
        monkeypatch.setattr(f"tuneship.prefect.waits.{name}", prefect)
    # There is a run to write on.
    monkeypatch.setattr("tuneship.prefect.waits.TaskRunContext.get", object)
    show = waits._progress_artifact(["ft_1"])
    for percent in (10.0, 20.0, 30.0):
        show(percent)
    assert asked == [0.0, 10.0, 20.0, 30.0], "each look tries again"
