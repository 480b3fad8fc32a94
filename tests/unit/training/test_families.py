"""Every family of base models learns the same as by peft and transformers alone, and its adapter is one of peft."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models.families import FAMILIES, UNPACKED, build_family
from tests.unit.training.test_learner import gradients, peft_loss, peft_model, settings, some_rows
from tuneship.training.base_model import load_base, load_encoder
from tuneship.training.examples.batches import collate
from tuneship.training.examples.data_files import read_rows
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import ProgressFile, StopRequest, TrainingFailed
from tuneship.training.spec import DataKeys
from tuneship.training.training_loop import train

if TYPE_CHECKING:
    from tests.unit.training.conftest import JobMaker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(tmp_path_factory.mktemp("families") / request.param, request.param)


def test_a_family_learns_by_the_loss_and_the_gradients_of_peft(family: Path) -> None:
    rows, everything = some_rows(), np.arange(4)
    learner = Learner(load_base(str(family)), settings(), SupervisedFineTuning())
    assert learner.packs == (family.name not in UNPACKED)
    with torch.no_grad():
        for name, weight in learner.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    peft = peft_model(family, learner.adapter())
    loss = peft_loss(peft, rows)
    loss.backward()
    wanted = {name: p.grad for name, p in peft.named_parameters() if p.grad is not None}
    measured = learner.evaluate(collate(rows, everything))
    found = gradients(learner)
    assert learner.learn([collate(rows, everything)], 12, step=1, rate=0.0) == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert measured["loss"] / 12 == pytest.approx(loss.item(), rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_a_long_row_does_not_change_the_rotation_of_a_short_one(
    tmp_path: Path, is_packed: bool
) -> None:
    """Rows of 4 to 21 tokens, on both sides of the border of LongRoPE."""
    folder, rows = build_family(tmp_path, "phi3-long"), some_rows()
    learner = Learner(load_base(str(folder)), settings(), SupervisedFineTuning())
    if not is_packed:
        learner._packing.disable()  # type: ignore[union-attr]
        learner._packing = None
    loss = peft_loss(peft_model(folder, learner.adapter()), rows).item()
    measured = learner.evaluate(collate(rows, np.arange(4)))
    assert measured["loss"] / 12 == pytest.approx(loss, rel=1e-5)


def test_a_family_is_tuned_from_rows_to_an_adapter_that_peft_loads(
    family: Path, make_job: "JobMaker"
) -> None:
    from peft import PeftModel

    job = make_job(base_model=str(family), epochs=3, learning_rate=0.03, validation_frequency=1.0)
    with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
        train(job.spec, DataKeys(), progress, StopRequest(job.directory / "cancel"))
    losses = [line["validation_loss"] for line in job.of_kind("step")]
    completed = job.of_kind("completed")[0]
    assert completed["validation_loss"] < 0.7 * losses[0]
    base = AutoModelForCausalLM.from_pretrained(family)
    tuned = PeftModel.from_pretrained(base, job.adapter)
    encoder = load_encoder(str(family), load_base(str(family)))
    rows = read_rows(make_job.validation_file, "instruction", encoder, SupervisedFineTuning()).rows
    assert peft_loss(tuned, rows).item() == pytest.approx(completed["validation_loss"], rel=1e-4)


def test_modules_are_adapted_by_name(family: Path) -> None:
    base = load_base(str(family))
    with pytest.raises(TrainingFailed) as failure:
        Learner(base, settings(target_modules=("nonsense",)), SupervisedFineTuning())
    named = failure.value.message.partition("; it has ")[2].split(", ")
    assert "lm_head" not in named
    for chosen in (named[0], named[-1]):
        learner = Learner(
            load_base(str(family)), settings(target_modules=(chosen,)), SupervisedFineTuning()
        )
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in learner.adapter()} == {
            chosen
        }


def test_a_large_model_is_read_in_bfloat16_and_its_adapter_learns_in_float32(
    tiny_model: Path,
) -> None:
    """Large models get this format on a processor that has it. Here the test asks for it."""
    rows = some_rows()
    exact = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    short = Learner(
        load_base(str(tiny_model)).to(torch.bfloat16), settings(), SupervisedFineTuning()
    )
    assert {weights.dtype for weights in short.adapter().values()} == {torch.float32}
    for learner in (exact, short):
        for step in range(1, 30):
            learner.learn([collate(rows, np.arange(4))], 12, step=step, rate=0.01)
    losses = [
        learner.evaluate(collate(rows, np.arange(4)))["loss"] / 12 for learner in (exact, short)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[1] < 1.0


WEIGHTS, CONFIG, A_TENSOR = "model.safetensors", "config.json", "model.layers.1.mlp.up_proj.weight"


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        edit(tensors)
        save_file(tensors, directory / WEIGHTS, {"format": "pt"})

    return apply


def cut(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda directory: directory.rename(directory.with_name("gone")), "OSError"),
        (lambda directory: (directory / WEIGHTS).unlink(), "OSError"),
        (cut, "weights are damaged"),
        (change(lambda tensors: tensors[A_TENSOR].fill_(torch.inf)), "not finite"),
        (change(lambda tensors: tensors.pop(A_TENSOR)), "1 of its tensors are missing"),
        (change(lambda t: t.update({A_TENSOR: torch.ones(3, 32)})), "RuntimeError"),
        (write(CONFIG, '{"model_type": "nobody"}'), "ValueError"),
        (write(CONFIG, '{"model_type": "gemma3"}'), "read more than text"),
        (write("tokenizer.json", "{"), "tokenizer.json cannot be read"),
        (write("chat_template.jinja", "{% for"), "the chat template is not valid"),
        (lambda d: build_family(d, "qwen2", vocab_size=200), "beyond the 200 that the model knows"),
    ],
    ids=(
        "gone",
        "no weights",
        "cut weights",
        "not finite",
        "tensor missing",
        "other shape",
        "unknown kind",
        "images",
        "tokenizer",
        "template",
        "large tokenizer",
    ),
)
def test_a_base_model_that_cannot_be_used_is_reported_before_the_first_step(
    make_job: "JobMaker", tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    directory = build_family(tmp_path / "base", "qwen2")
    damage(directory)
    job = make_job(base_model=str(directory))
    with (
        closing(ProgressFile(tmp_path / "lines")) as progress,
        pytest.raises(TrainingFailed) as failure,
    ):
        train(job.spec, DataKeys(), progress, StopRequest(tmp_path / "cancel"))
    assert failure.value.reason == "internal"
    assert failure.value.message.startswith("the base model cannot be used: ")
    assert problem in failure.value.message
    assert str(tmp_path) not in failure.value.message
