"""Each hyperparameter of a job does what it says, and each test fails when the value is ignored."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.test_learner import settings, some_rows
from tuneship.training.base_model import load_base
from tuneship.training.examples.batches import collate
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.spec import DataKeys
from tuneship.training.training_loop import train

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Trained:
    """The steps, the adapter and the weights that a job left behind."""

    def __init__(self, job: "Job") -> None:
        with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
            train(job.spec, DataKeys(), progress, StopRequest(job.directory / "cancel"))
        self.steps = job.of_kind("step")
        self.started = job.of_kind("started")[0]
        self.config: dict[str, Any] = json.loads((job.adapter / "adapter_config.json").read_text())
        self.weights = load_file(job.adapter / "adapter_model.safetensors")

    def of_steps(self, name: str) -> list[Any]:
        return [step[name] for step in self.steps]


def test_rate_warm_up_epochs_and_batch_size_make_the_steps(make_job: "JobMaker") -> None:
    """48 rows in batches of 20, twice, make 6 steps. The last batch of an epoch is smaller."""
    trained = Trained(make_job(batch_size=20, epochs=2, warmup_steps=3, learning_rate=0.012))
    assert (trained.started["total_steps"], trained.started["total_epochs"]) == (6, 2)
    assert trained.of_steps("learning_rate") == pytest.approx(
        [0.004, 0.008, 0.012, 0.012, 0.008, 0.004]
    )
    assert trained.of_steps("current_epoch") == [1, 1, 1, 2, 2, 2]


def test_the_rate_of_a_step_is_what_the_weights_move_by(tiny_model: Path) -> None:
    """AdamW's first step moves every number by the rate, whatever the gradient is."""
    rows = some_rows()
    for rate in (0.001, 0.02):
        learner = Learner(
            load_base(str(tiny_model)), settings(learning_rate=0.5), SupervisedFineTuning()
        )
        before = learner.adapter()
        learner.learn([collate(rows, rows.lengths.argsort())], 12, step=1, rate=rate)
        moved = [
            (weights - before[name]).abs().max().item()
            for name, weights in learner.adapter().items()
            if "lora_B" in name
        ]
        assert moved == pytest.approx([rate] * len(moved), rel=1e-3)


def test_rank_alpha_and_modules_shape_the_adapter(make_job: "JobMaker") -> None:
    trained = Trained(
        make_job(
            epochs=1,
            validation_frequency=1,
            lora_rank=3,
            lora_alpha=12,
            target_modules=("q_proj", "down_proj"),
        )
    )
    assert (trained.config["r"], trained.config["lora_alpha"]) == (3, 12)
    assert sorted(trained.config["target_modules"]) == ["down_proj", "q_proj"]
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in trained.weights}
    assert names == {"q_proj", "down_proj"}
    ranks = {min(weights.shape) for weights in trained.weights.values()}
    assert ranks == {3}
    assert trained.started["trainable_parameters"] == sum(
        weights.numel() for weights in trained.weights.values()
    )


def test_alpha_over_rank_scales_what_the_adapter_adds(tiny_model: Path) -> None:
    added: list[torch.Tensor] = []
    for alpha in (0.0, 4.0, 8.0):
        torch.manual_seed(0)
        learner = Learner(
            load_base(str(tiny_model)), settings(lora_alpha=alpha), SupervisedFineTuning()
        )
        generator = torch.Generator().manual_seed(1)
        learner.load_adapter(
            {
                name: 1e-2 * torch.randn(weights.shape, generator=generator)
                for name, weights in learner.adapter().items()
            }
        )
        added.append(learner.greedy_logits([7, 8, 9], 1)[0])
    base, half, whole = added
    ratio = torch.linalg.vector_norm(whole - base) / torch.linalg.vector_norm(half - base)
    assert ratio.item() == pytest.approx(2, rel=0.05)


def test_dropout_changes_what_is_learnt_and_never_what_is_measured(tiny_model: Path) -> None:
    batch = collate(some_rows(), some_rows().lengths.argsort())
    losses: dict[float, list[float]] = {}
    for dropout in (0.0, 0.4):
        learner = Learner(
            load_base(str(tiny_model)), settings(lora_dropout=dropout), SupervisedFineTuning()
        )
        learner.load_adapter(
            {name: torch.full_like(w, 0.05) for name, w in learner.adapter().items()}
        )
        measured = [learner.evaluate(batch)["loss"] / 12 for _ in range(2)]
        learnt = [learner.learn([batch], 12, step=step, rate=0.0) for step in (1, 2)]
        losses[dropout] = [*measured, *learnt]
    exact = losses[0.0][0]
    assert losses[0.0] == pytest.approx([exact] * 4, rel=1e-5)
    assert losses[0.4][:2] == pytest.approx([exact] * 2, rel=1e-5)
    assert abs(losses[0.4][2] - exact) > 1e-3
    assert abs(losses[0.4][2] - losses[0.4][3]) > 1e-4


def test_the_seed_decides_first_weights_and_order_and_nothing_else_does(
    make_job: "JobMaker",
) -> None:
    runs = [
        Trained(make_job(seed=seed, epochs=1, validation_frequency=1)).of_steps("training_loss")
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_model_is_measured_as_often_as_asked(make_job: "JobMaker") -> None:
    trained = Trained(make_job(epochs=2, validation_frequency=4))
    assert [step["step"] for step in trained.steps if step["evaluated"]] == [1, 4, 8, 12]
