"""A training whose validation loss no longer falls ends early, at the same step and bits even after a kill."""

import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.spec import DataKeys

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
MakeOverfitting = Callable[[int | None], "Job"]
# Epochs of 6 steps, with a measurement after each epoch.
EPOCHS = 8


class Killed(BaseException):
    """Raised in place of a kill: the process is gone."""


class KillAfterStep(StopRequest):
    """Kills the process after a step, once its checkpoint is saved, when the loop asks whether to stop."""

    def __init__(self, progress: ProgressFile, step: int) -> None:
        self._progress, self._step = progress, step

    def raise_if_requested(self) -> None:
        if self._progress.step == self._step:
            raise Killed


def run(job: "Job", until_step: int | None = None) -> None:
    from tuneship.training.training_loop import train

    with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
        stop = StopRequest(job.directory / "cancel")
        if until_step is not None:
            stop = KillAfterStep(progress, until_step)
        train(job.spec, DataKeys(), progress, stop)


@pytest.fixture
def make_overfitting(make_job: "JobMaker", tmp_path: Path) -> MakeOverfitting:
    """Make a job whose validation loss rises soon, because the letters it asks for are unlearnt with every step."""
    other = tmp_path / "other.jsonl"
    other.write_text('{"instruction": "What is it?", "response": "QXZJ"}\n' * 12)
    return lambda patience: make_job(
        epochs=EPOCHS,
        learning_rate=0.2,
        validation_file=other,
        validation_frequency=1.0,
        early_stopping_patience=patience,
    )


def curve_of(job: "Job") -> dict[int, float]:
    """Return the validation loss by measured step. A repeated step overwrites the one before."""
    return {
        line["step"]: line["validation_loss"]
        for line in job.of_kind("step")
        if line["step"] % 6 == 0
    }


def test_it_ends_at_the_first_place_where_patience_is_over(
    make_overfitting: MakeOverfitting,
) -> None:
    job = make_overfitting(2)
    run(job)
    curve = curve_of(job)
    steps = sorted(curve)
    best = min(steps, key=curve.__getitem__)
    assert steps[-2:] == [best + 6, best + 12]
    assert steps[-1] < 6 * EPOCHS
    (early,) = job.of_kind("ended_early")
    assert (early["step"], early["best_step"], early["patience"]) == (best + 12, best, 2)
    (end,) = job.of_kind("completed")
    assert (end["best_step"], end["validation_loss"]) == (best, curve[best])
    # Nowhere earlier did the loss stay this long above its lowest, or the training would have ended there.
    lows = list(itertools.accumulate((curve[step] for step in steps), min))
    assert all(lows[index] < lows[index - 2] for index in range(2, len(lows) - 1))


def test_without_it_and_with_more_than_there_are_all_epochs_are_done(
    make_overfitting: MakeOverfitting,
) -> None:
    plain = make_overfitting(None)
    patient = make_overfitting(EPOCHS)
    for job in (plain, patient):
        run(job)
        assert (max(curve_of(job)), job.of_kind("ended_early")) == (6 * EPOCHS, [])
    assert plain.weights() == patient.weights()


@pytest.mark.parametrize("measurements", [1, 2, 3])
def test_a_killed_one_ends_at_the_same_step_with_the_same_bits(
    make_overfitting: MakeOverfitting, measurements: int
) -> None:
    whole, broken = make_overfitting(2), make_overfitting(2)
    run(whole)
    with pytest.raises(Killed):
        run(broken, until_step=6 * measurements)
    run(broken)
    assert curve_of(broken) == curve_of(whole)
    assert broken.of_kind("ended_early") == whole.of_kind("ended_early")
    assert broken.weights() == whole.weights()
