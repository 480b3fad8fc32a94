"""A training whose validation loss does not fall any more ends early, at the same step and bits over a kill."""

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
Make = Callable[[int | None], "Job"]
EPOCHS = 8
"""Of 6 steps, measured after each."""


class Killed(BaseException):
    """The process is gone."""


class Death(StopRequest):
    """Comes after a step, once its checkpoint is saved: there the loop asks whether to stop."""

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
            stop = Death(progress, until_step)
        train(job.spec, DataKeys(), progress, stop)


@pytest.fixture
def make(make_job: "JobMaker", tmp_path: Path) -> Make:
    """A job whose validation loss rises soon: it asks for letters that are unlearnt with every step."""
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
    """Validation loss by measured step; a repeated step overwrites the one before."""
    return {
        line["step"]: line["validation_loss"]
        for line in job.of_kind("step")
        if line["step"] % 6 == 0
    }


def test_it_ends_at_the_first_place_where_patience_is_over(make: Make) -> None:
    job = make(2)
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
    # Nowhere before has it been so: else it should have ended there.
    lows = list(itertools.accumulate((curve[step] for step in steps), min))
    assert all(lows[place] < lows[place - 2] for place in range(2, len(lows) - 1))


def test_without_it_and_with_more_than_there_are_all_epochs_are_done(make: Make) -> None:
    plain = make(None)
    patient = make(EPOCHS)
    for job in (plain, patient):
        run(job)
        assert (max(curve_of(job)), job.of_kind("ended_early")) == (6 * EPOCHS, [])
    assert plain.weights() == patient.weights()


@pytest.mark.parametrize("measurements", [1, 2, 3])
def test_a_killed_one_ends_at_the_same_step_with_the_same_bits(
    make: Make, measurements: int
) -> None:
    whole, broken = make(2), make(2)
    run(whole)
    with pytest.raises(Killed):
        run(broken, until_step=6 * measurements)
    run(broken)
    assert curve_of(broken) == curve_of(whole)
    assert broken.of_kind("ended_early") == whole.of_kind("ended_early")
    assert broken.weights() == whole.weights()
