"""A batch is cut so that it fits in memory, and is learnt as one however it is cut."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.families import build_family
from tests.unit.training.test_learner import settings, some_rows
from tuneship.training.base_model import load_base, load_encoder
from tuneship.training.device import free_memory, number_format, number_format_of_job
from tuneship.training.examples.data_files import read_data
from tuneship.training.examples.micro_batches import (
    MAX_MICRO_BATCH_TOKENS,
    affordable_tokens,
    bytes_per_token,
)
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.training_loop import Standing, TrainingLoop

if TYPE_CHECKING:
    from tests.unit.training.conftest import JobMaker

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@given(each=st.floats(1, 1e9), free=st.integers(0, 2**45))
def test_a_micro_batch_fits_half_of_the_free_memory(each: float, free: int) -> None:
    most = affordable_tokens(each, free)
    assert 1 <= most <= MAX_MICRO_BATCH_TOKENS
    assert most == 1 or most * each <= free / 2
    assert most == MAX_MICRO_BATCH_TOKENS or 2 * most * each > free / 2, (
        "twice as many would not fit"
    )


def test_the_machine_says_how_much_memory_is_free() -> None:
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        everything = torch.cuda.mem_get_info()[1]
    assert 1 << 26 < free_memory() < everything


def test_the_number_format_of_a_job_is_chosen_once(tmp_path: Path) -> None:
    """A second measurement might give another result, and the job would then not go on to the same bits."""
    folder = tmp_path / "checkpoints"
    assert number_format_of_job(folder, 10, lambda _: torch.bfloat16) is torch.bfloat16
    assert number_format_of_job(folder, 10, lambda _: torch.float32) is torch.bfloat16
    # The process was killed while it wrote this file.
    (folder / "number_format").write_text("")
    assert number_format_of_job(folder, 10, lambda _: torch.float32) is torch.float32


def test_a_small_model_is_read_in_float32_and_a_large_one_in_what_is_quicker_here() -> None:
    assert number_format(1_000_000) is torch.float32
    assert number_format(10_000_000) in (torch.float32, torch.bfloat16)


@pytest.mark.slow
def test_a_larger_model_and_a_larger_vocabulary_take_more(
    tmp_path: Path,
) -> None:
    def each(name: str, family: str = "llama", **changes: int) -> float:
        base = load_base(str(build_family(tmp_path / name, family, **changes)))
        return bytes_per_token(Learner(base, settings(), SupervisedFineTuning()), some_rows())

    plain = each("plain")
    assert each("deep", num_hidden_layers=4) > 1.5 * plain
    assert each("wide", hidden_size=64, intermediate_size=128) > 1.5 * plain
    assert each("words", vocab_size=261 * 8) > plain + 0.9 * 261 * 7 * 4


@pytest.mark.slow
def test_the_measured_memory_is_the_known_size_of_the_activations_of_a_layer(
    tmp_path: Path,
) -> None:
    """A layer of Llama keeps at least its inputs to seven products and to two norms, 4 bytes a number."""
    base = load_base(str(build_family(tmp_path / "a", "llama", num_hidden_layers=8)))
    other = load_base(str(build_family(tmp_path / "b", "llama", num_hidden_layers=2)))
    rows = some_rows()
    layer = (
        bytes_per_token(Learner(base, settings(), SupervisedFineTuning()), rows)
        - bytes_per_token(Learner(other, settings(), SupervisedFineTuning()), rows)
    ) / 6
    least = 4 * (32 + 64 + 64)
    assert least < layer < 10 * least


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [12, 5])
def test_little_memory_changes_how_often_the_model_is_called_and_not_what_it_learns(
    make_job: "JobMaker", tiny_model: Path, batch_size: int
) -> None:
    job = make_job(batch_size=batch_size, lora_dropout=0.0, epochs=1, validation_frequency=1)
    base = load_base(str(tiny_model))
    encoder = load_encoder(str(tiny_model), base)
    found: dict[int, tuple[float, int, dict[str, torch.Tensor]]] = {}
    for most in (MAX_MICRO_BATCH_TOKENS, 64, 1):
        spec = replace(job.spec, checkpoint_dir=job.directory / str(most))
        with closing(ProgressFile(job.directory / f"{most}.jsonl")) as progress:
            learner = Learner(
                load_base(str(tiny_model)), spec.hyperparameters, SupervisedFineTuning()
            )
            calls: list[bool] = []
            learner.model.register_forward_pre_hook(
                lambda model, _, to=calls: to.append(model.training)
            )
            data = read_data(spec, encoder, SupervisedFineTuning(), progress)
            stop = StopRequest(job.directory / "cancel")
            run = TrainingLoop(spec, data, learner, progress, stop)
            run._standing = Standing(micro_batch_tokens=most)
            standing = run.execute(1e9)
        assert standing.step == -(-48 // batch_size)
        found[most] = standing.measures["validation_loss"], sum(calls), learner.adapter()
    whole, some, single = found.values()
    assert whole[1] < some[1] < single[1] == 48
    for cut in (some, single):
        assert cut[0] == pytest.approx(whole[0], rel=1e-3)
        for name, weights in whole[2].items():
            torch.testing.assert_close(cut[2][name], weights, rtol=0.05, atol=2e-3)
