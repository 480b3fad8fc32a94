"""One job on several devices: real processes, here each with a part of the processor."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import children, is_alive, until
from tuneship.training.distributed import Setup, WorkerRanks
from tuneship.training.examples.batches import split_among_ranks
from tuneship.training.objective import AnswerEnds
from tuneship.training.progress_file import RankLost, TrainingFailed
from tuneship.training.spec import SIGNALLED

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker
    from tuneship.processes.worker_protocol import Runtime

ISOLATED = (
    "import os\nfrom pathlib import Path\nfrom tuneship.isolation.isolation import isolate\n"
    "from tuneship.isolation.landlock import Places\n"
    "os.environ['TMPDIR'] = {folder!r}\nisolate(Places((Path({base!r}),), (Path({folder!r}),)))"
)
MANY_EPOCHS = 10_000
# Program that holds a training before a step until a file exists, so that a test never looks at it too late.
STAYS_BEFORE_STEP = """
import pathlib, time
from tuneship.training.distributed import RankGroup
def staying(self, *arguments, step, learn=RankGroup.learn, **more):
    while step == {step} and not pathlib.Path({until!r}).exists():
        time.sleep(0.01)
    return learn(self, *arguments, step=step, **more)
RankGroup.learn = staying
"""


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    count=st.integers(1, 9),
    seed=st.integers(0, 100),
)
def test_every_row_goes_to_one_rank_and_all_get_about_as_many_tokens(
    lengths: list[int], count: int, seed: int
) -> None:
    sizes = np.array(lengths)
    rows = np.random.default_rng(seed).permutation(len(lengths))
    dealt = split_among_ranks(rows, sizes, count)
    assert sorted(np.concatenate(dealt)) == sorted(rows)
    assert len(dealt) == count
    assert len(dealt[0]) > 0, "the first one takes the step"
    tokens = [int(sizes[share].sum()) for share in dealt]
    assert max(tokens) - min(tokens) <= max(lengths)


def rank_1_of(job: "Job", trainer: int) -> int:
    """Return the id of the second process of a job, once the job has learnt something."""
    until(lambda: job.of_kind("step"))
    (rank_1,) = children(trainer)
    assert b"tuneship.training.worker_rank" in Path(f"/proc/{rank_1}/cmdline").read_bytes()
    return rank_1


def curve(job: "Job") -> list[tuple[float, float]]:
    last = {line["step"]: line for line in job.of_kind("step")}
    return [(line["training_loss"], line["validation_loss"]) for line in last.values()]


@pytest.fixture(scope="module")
def whole_pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, forks: "Runtime"
) -> "Job":
    """Run a job on two devices, with dropout, to its end without a break."""
    from tests.unit.training.conftest import JobMaker

    job = JobMaker(tmp_path_factory.mktemp("pair"), tiny_model, forks)(devices=2)
    assert job.run() == 0
    return job


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "batch_size"),
    [
        pytest.param(2, 8, id="2 devices"),
        pytest.param(3, 47, id="3 devices, and a last batch of one row", marks=pytest.mark.soak),
    ],
)
def test_several_devices_learn_what_one_learns_also_without_network(
    make_job: "JobMaker", devices: int, batch_size: int
) -> None:
    alone = make_job(lora_dropout=0.0, batch_size=batch_size)
    shared = make_job(lora_dropout=0.0, batch_size=batch_size, devices=devices)
    folder = str(shared.directory.parent)
    isolated = ISOLATED.format(base=shared.spec.base_model, folder=folder)
    assert alone.run() == 0
    assert shared.run(isolated) == 0
    for expected, found in zip(curve(alone), curve(shared), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    messages = [line["message"] for line in shared.of_kind("log")]
    assert f"{devices} devices train together, each on its share of every batch" in messages
    assert (shared.adapter / "parity.json").exists()


@pytest.mark.slow
@pytest.mark.soak
def test_a_job_has_no_more_processes_than_rows_in_a_batch(make_job: "JobMaker") -> None:
    job, alone = make_job(batch_size=1, devices=4, epochs=1), make_job(batch_size=1, epochs=1)
    assert (job.run(), alone.run()) == (0, 0)
    assert job.weights() == alone.weights()
    assert job.of_kind("log") == alone.of_kind("log")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_job_resumes_to_the_same_bits(
    make_job: "JobMaker", whole_pair: "Job", tmp_path: Path, victim: int
) -> None:
    job, killed = make_job(devices=2), tmp_path / "killed"
    process = job.start(STAYS_BEFORE_STEP.format(step=10, until=str(killed)))
    ranks = [process.pid, rank_1_of(job, process.pid)]
    os.kill(ranks[victim], signal.SIGKILL)
    killed.touch()
    code = process.wait()
    assert code == (-signal.SIGKILL if victim == 0 else SIGNALLED + signal.SIGKILL)
    until(lambda: not any(map(is_alive, ranks)))
    assert not job.adapter.exists()
    assert job.lines()[-1]["kind"] not in ("completed", "failed", "cancelled")

    assert job.run() == 0
    assert curve(job) == curve(whole_pair)
    assert job.weights() == whole_pair.weights()


@pytest.mark.slow
def test_a_cancel_ends_every_rank_also_one_that_does_not_answer(make_job: "JobMaker") -> None:
    job = make_job(devices=2, epochs=MANY_EPOCHS)
    process = job.start()
    rank_1 = rank_1_of(job, process.pid)
    os.kill(rank_1, signal.SIGSTOP)
    (job.directory / "cancel").touch()
    assert process.wait() == 0
    until(lambda: not is_alive(rank_1))
    assert job.lines()[-1]["kind"] == "cancelled"


@pytest.mark.slow
def test_sigterm_to_the_group_is_a_cancel_and_no_lost_rank(make_job: "JobMaker") -> None:
    job = make_job(devices=2, epochs=MANY_EPOCHS)
    process = job.start()
    rank_1 = rank_1_of(job, process.pid)
    os.kill(rank_1, signal.SIGTERM)
    seen = len(job.of_kind("step"))
    until(lambda: len(job.of_kind("step")) > seen + 1)
    process.terminate()
    assert process.wait() == 0
    until(lambda: not is_alive(rank_1))
    assert job.lines()[-1]["kind"] == "cancelled"


@pytest.mark.slow
@pytest.mark.soak
def test_a_job_goes_on_with_another_number_of_devices(
    make_job: "JobMaker", whole_pair: "Job", tmp_path: Path
) -> None:
    job = make_job(devices=2)
    process = job.start(STAYS_BEFORE_STEP.format(step=10, until=str(tmp_path / "never")))
    until(lambda: any(job.spec.checkpoint_dir.glob("step-*")))
    process.kill()
    process.wait()
    (job.directory / "spec.json").write_text(replace(job.spec, devices=1).to_json())
    assert job.run() == 0
    assert [line["message"] for line in job.of_kind("log")][-1].startswith(
        "2 devices trained until"
    )
    assert len(curve(job)) == len(curve(whole_pair))


@pytest.mark.slow
def test_a_failure_of_another_rank_is_reported_like_one_of_the_first(
    make_job: "JobMaker", tmp_path: Path
) -> None:
    settings = make_job().spec.hyperparameters
    with WorkerRanks(2) as ranks:
        ranks.set_up(
            Setup(2, str(tmp_path / "none"), "float32", "cpu", 1, settings, AnswerEnds((), 1))
        )
        with pytest.raises(TrainingFailed, match="the base model cannot be used"):
            ranks.workers[0].receive()
        with pytest.raises(RankLost, match="rank 1 ended with 1"):
            ranks.workers[0].receive()
