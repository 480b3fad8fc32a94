"""A training that is killed anywhere goes on to the same bits: losses of every step, epochs, and the adapter.

A kill is played by an exception that no code of ours catches, raised at any line of `tuneship/training/` (before, in
and after a step, in the middle of a measurement, of a checkpoint or of the adapter). `test_process.py` kills real
processes.
"""

import copy
import random
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import pytest

import tuneship.training
from tuneship.training.progress_file import ProgressFile, StopRequest

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker
    from tuneship.processes.worker_protocol import Runtime

ROOM = str(Path(tuneship.training.__file__).parent)
# Number of kills anywhere, in a step or a measurement, and while writing the files that must survive.
POINTS = {"": 8, "learner.py": 6, "checkpoints.py": 6}


NO_WARNING = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


class Killed(BaseException):
    """Raised in place of a kill: the process is gone."""


@dataclass
class TracedLines:
    """The executed lines of `tuneship/training/`, by file and function. The process ends at line number `last`."""

    last: int = 0
    passed: list[str] = field(default_factory=list)

    def __enter__(self) -> "TracedLines":
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(ROOM) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.passed.append(f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}")
            if len(self.passed) == self.last:
                raise Killed
        return self._line


class Attempt(Protocol):
    def __call__(
        self, job: "Job", lines: TracedLines, clock: Callable[[], float] = lambda: 0.0
    ) -> None: ...


def progress_of(job: "Job") -> ProgressFile:
    return ProgressFile(job.directory / "progress.jsonl")


@pytest.fixture(scope="module")
def attempt(whole_job: "Job") -> Attempt:
    """Return a function that trains like a process that has read the model and the rows. All attempts share both."""
    import torch

    from tuneship.training.base_model import load_base, load_encoder
    from tuneship.training.checkpoints import make_directory
    from tuneship.training.examples.data_files import read_data
    from tuneship.training.learner import Learner
    from tuneship.training.objective import AnswerEnds, SupervisedFineTuning
    from tuneship.training.training_loop import TrainingLoop

    torch.set_num_threads(1)
    spec = whole_job.spec
    base = load_base(spec.base_model)
    encoder = load_encoder(spec.base_model, base)
    objective = SupervisedFineTuning(AnswerEnds(encoder.end_tokens, encoder.context_length))
    with closing(progress_of(whole_job)) as progress:
        data = read_data(spec, encoder, objective, progress)
    # This length is counted once and known afterwards.
    assert len(data.training.lengths) > len(data.validation.lengths)

    def attempt(job: "Job", lines: TracedLines, clock: Callable[[], float] = lambda: 0.0) -> None:
        learner = Learner(copy.deepcopy(base), job.spec.hyperparameters, objective)
        stop = StopRequest(job.directory / "cancel")
        with closing(progress_of(job)) as progress, lines:
            run = TrainingLoop(job.spec, data, learner, progress, stop)
            run.execute(1e6, clock)
            make_directory(job.adapter, run.save_best)

    return attempt


def outcome(job: "Job") -> tuple[Any, ...]:
    """Return what a supervisor knows in the end. A repeated step or epoch overwrites the one before."""
    curve = {line["step"]: line for line in job.of_kind("step")}
    epochs = {line["epoch"]: line for line in job.of_kind("epoch")}
    return curve, epochs, job.weights()


@pytest.fixture(scope="module")
def uninterrupted(
    whole_job: "Job", attempt: Attempt, tmp_path_factory: pytest.TempPathFactory, forks: "Runtime"
) -> list[str]:
    """Return every line of an uninterrupted training, which ends with the same bits as in a process of its own."""
    from tests.unit.training.conftest import JobMaker

    job = JobMaker(tmp_path_factory.mktemp("way"), Path(whole_job.spec.base_model), forks)()
    lines = TracedLines()
    attempt(job, lines)
    assert outcome(job) == outcome(whole_job)
    return lines.passed


@pytest.mark.slow
@NO_WARNING
@pytest.mark.parametrize(
    ("file", "number"),
    [
        # Each commit tries every second one.
        pytest.param(file, number, marks=[pytest.mark.soak] if number % 2 else [])
        for file, count in POINTS.items()
        for number in range(count)
    ],
)
def test_a_training_killed_at_any_line_ends_with_the_same_bits(
    whole_job: "Job",
    attempt: Attempt,
    uninterrupted: list[str],
    make_job: "JobMaker",
    file: str,
    number: int,
) -> None:
    """Each case draws one line from its part of the training (or of its lines in that file)."""
    positions = [
        position for position, line in enumerate(uninterrupted, 1) if line.startswith(file)
    ]
    dice = random.Random(number)  # noqa: S311 - a test draws this number
    last = positions[int((number + dice.random()) * len(positions) / POINTS[file])]
    job = make_job()
    assert job.spec.hyperparameters.lora_dropout > 0
    lines = TracedLines(last)
    with pytest.raises(Killed):
        attempt(job, lines)
    assert lines.passed[-1] == uninterrupted[last - 1]
    attempt(job, TracedLines())
    assert outcome(job) == outcome(whole_job)


@pytest.mark.slow
@NO_WARNING
def test_a_checkpoint_is_kept_every_ten_minutes_at_least(
    attempt: Attempt, make_job: "JobMaker"
) -> None:
    """A step takes three minutes on this slow machine, and the only other checkpoint would be at the end."""
    job = make_job(validation_frequency=12)
    attempt(job, TracedLines(), clock=lambda: 180.0 * len(job.of_kind("step")))
    kept = sorted(path.name for path in job.spec.checkpoint_dir.iterdir())
    assert kept == ["step-000000008", "step-000000012"]
    assert job.of_kind("pace")[-1]["seconds_per_step"] == 180
