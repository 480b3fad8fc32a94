"""A training on a GPU, played on a machine without one: torch's `meta` device stands for it where that is enough."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.unit.training.test_learner import settings, some_rows
from tuneship.training.base_model import load_base
from tuneship.training.device import (
    free_memory,
    needs_autocast,
    number_format,
)
from tuneship.training.examples.batches import collate
from tuneship.training.examples.packing import PackedAttention
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import ProgressFile
from tuneship.training.training_loop import _count_ranks

if TYPE_CHECKING:
    from tests.unit.training.conftest import JobMaker

SAYS_WHAT_IT_SEES = """
import os
from tuneship.training import training_loop
def say(spec, keys, progress, stop):
    progress.log("info", os.environ["CUDA_VISIBLE_DEVICES"])
training_loop.train = say
"""
NO_WARNING = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
META = torch.device("meta")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Play a GPU of an old kind, which computes in bfloat16 by emulation only, and return its properties."""
    facts: dict[str, Any] = {"native": False}
    kind = SimpleNamespace(name="Tesla T4", uuid="3f2a")

    def supports(including_emulation: bool = True) -> bool:
        return including_emulation or facts["native"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supports)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: kind)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 400)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    return facts


def test_a_gpu_that_only_emulates_bfloat16_computes_in_float32(gpu: dict[str, Any]) -> None:
    assert number_format(10_000_000) is torch.float32
    gpu["native"] = True
    assert number_format(10_000_000) is torch.bfloat16
    assert number_format(1_000_000) is torch.float32, "small models, as on a processor"


def test_memory_that_the_allocator_of_a_gpu_keeps_is_free(gpu: dict[str, Any]) -> None:
    assert free_memory(3) == 1000 + 300


def test_a_base_model_in_float32_is_not_rounded_on_its_way_through_a_gpu() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert needs_autocast(cuda, torch.bfloat16)
    assert not needs_autocast(cuda, torch.float32)
    assert not needs_autocast(cpu, torch.bfloat16)


def test_a_jobs_log_says_on_which_gpus_it_trains(
    gpu: dict[str, Any], make_job: "JobMaker", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line is that of a cluster, which chooses; the process then knows its own numbers only."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job = make_job()
    more = {"gpus": ("3", "1"), "devices": 2}
    with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
        for changes in ({}, more, {**more, "shares_gpus": True}):
            assert _count_ranks(replace(job.spec, **changes), progress) == (2 if changes else 1)
    lines = [line for line in job.of_kind("log") if "trains on" in line["message"]]
    two = "trains on GPU 3 (Tesla T4, 3f2a) and GPU 1 (Tesla T4, 3f2a)"
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "trains on GPU 0 (Tesla T4, 3f2a)"),
        ("info", two),
        ("warning", f"{two}, beside others: more processes run than there are GPUs"),
    ]
    named = [line["devices"] for line in job.of_kind("devices")]
    assert named[:2] == [["GPU 0 (Tesla T4, 3f2a)"], two.removeprefix("trains on ").split(" and ")]


def test_a_jobs_log_says_that_torch_cannot_use_the_gpus_of_the_machine(
    make_job: "JobMaker", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = make_job(gpus=("0",))
    with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
        assert _count_ranks(job.spec, progress) == 1
    (line,) = job.of_kind("log")
    assert line["level"] == "warning"
    assert "the GPUs of this machine cannot be used" in line["message"]


@pytest.mark.slow
def test_a_training_process_sees_the_gpus_of_its_job_alone(make_job: "JobMaker") -> None:
    """Also with its libraries loaded before the order came, as they are here: none has asked for a GPU by then."""
    job = make_job(gpus=("3", "GPU-1f"))
    assert job.run(SAYS_WHAT_IT_SEES) == 0
    assert [line["message"] for line in job.of_kind("log")] == ["3,GPU-1f"]


@NO_WARNING
@pytest.mark.slow
def test_a_restored_optimizer_is_on_the_device_of_the_weights(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW's fused step on a GPU refuses a step counter that is on the processor."""
    here = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    here.learn([collate(some_rows(), np.arange(4))], 12, step=1, rate=0.1)
    monkeypatch.setattr(PackedAttention, "for_model", lambda _: None)
    there = Learner(load_base(str(tiny_model), place=META), settings(), SupervisedFineTuning())
    there.restore(here.state())
    state = there.state()
    assert state.keys() == here.state().keys()
    assert {name: tensor.device.type for name, tensor in state.items()} == dict.fromkeys(
        state, "meta"
    )


@NO_WARNING
@pytest.mark.slow
def test_a_restored_optimizer_leaves_the_checkpoint_as_it_is(tiny_model: Path) -> None:
    batch = collate(some_rows(), np.arange(4))
    learner = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    learner.learn([batch], 12, step=1, rate=0.1)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    # The names in the checkpoints of all versions.
    kinds = ("adapter", "optimizer/step", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    assert state.keys() == {f"{kind}/{name}" for kind in kinds for name in learner.adapter()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    learner.restore(state)
    learner.learn([batch], 12, step=2, rate=0.1)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
