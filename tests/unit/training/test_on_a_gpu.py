"""A training on a real GPU. The other tests of this folder train on it as well where there is one."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.support.waiting import until
from tests.unit.training.test_learner import settings, some_rows
from tuneship.isolation.landlock import NoLandlock, version
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.service.jobs.local_launcher import trainer_spec
from tuneship.training.base_model import load_base
from tuneship.training.examples.batches import collate
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.spec import Order

if TYPE_CHECKING:
    from tests.unit.training.conftest import JobMaker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

# By then a library could have asked for the GPUs.
LOADED = "import tuneship.training.training_loop"
LITTLE_MEMORY = "import torch; torch.cuda.set_per_process_memory_fraction(1e-5)"
NO_GPU = "GPU-00000000-0000-0000-0000-000000000000"


def test_it_learns_what_a_processor_learns(tiny_model: Path) -> None:
    batch = collate(some_rows(), np.arange(4))
    losses: dict[str, list[float]] = {}
    adapters: dict[str, dict[str, torch.Tensor]] = {}
    for kind in ("cpu", "cuda"):
        base = load_base(str(tiny_model), place=torch.device(kind))
        learner = Learner(base, settings(), SupervisedFineTuning())
        assert learner.packs
        losses[kind] = [learner.learn([batch], 12, step=n, rate=0.01) for n in range(1, 21)]
        adapters[kind] = {name: weights.cpu() for name, weights in learner.adapter().items()}
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["cuda"][-1] < losses["cuda"][0] / 2
    for name, weights in adapters["cpu"].items():
        torch.testing.assert_close(adapters["cuda"][name], weights, rtol=0.05, atol=2e-3)


def test_it_goes_on_from_a_checkpoint(tiny_model: Path) -> None:
    batch = collate(some_rows(), np.arange(4))
    one = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    one.learn([batch], 12, step=1, rate=0.1)
    state = {name: tensor.cpu() for name, tensor in one.state().items()}
    other = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    other.restore(state)
    losses = [learner.learn([batch], 12, step=2, rate=0.1) for learner in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, weights in one.adapter().items():
        torch.testing.assert_close(other.adapter()[name], weights, rtol=1e-4, atol=1e-6)


def test_an_isolated_process_trains_on_it(make_job: "JobMaker") -> None:
    try:
        version()
    except NoLandlock as reason:
        pytest.skip(str(reason))
    job = make_job()
    for folder in job.spec.written_paths:
        folder.mkdir()
    reader, writer = os.pipe()
    os.write(writer, Order(job.directory).to_line().encode())
    spec = trainer_spec(job.directory, job.spec, reader)
    worker = LocalProcesses(isolated=True).start(spec)
    for end in (reader, writer):
        os.close(end)
    try:
        until(lambda: worker.exit_code() is not None, 600)
    finally:
        worker.kill()
    assert worker.exit_code() == 0, spec.log.read_text()
    assert job.of_kind("devices")


def test_it_is_the_one_that_the_spec_names(make_job: "JobMaker") -> None:
    uuid = torch.cuda.get_device_properties(0).uuid
    job = make_job(gpus=(f"GPU-{uuid}",), epochs=1)
    assert job.run(LOADED) == 0
    (line,) = job.of_kind("devices")
    assert str(uuid) in line["devices"][0]


def test_a_training_whose_gpu_is_gone_uses_the_processor(make_job: "JobMaker") -> None:
    job = make_job(gpus=(NO_GPU,), epochs=1)
    assert job.run(LOADED) == 0
    assert not job.of_kind("devices")
    (line,) = (line for line in job.of_kind("log") if "trains on" in line["message"])
    assert line["level"] == "warning"


def test_too_little_memory_of_it_ends_a_job_with_that_reason(make_job: "JobMaker") -> None:
    job = make_job()
    assert job.run(LITTLE_MEMORY) == 1
    assert job.lines()[-1]["reason"] == "out_of_memory"
